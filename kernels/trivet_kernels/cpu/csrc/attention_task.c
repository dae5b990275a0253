/* Paged attention: the tasks of one thread. See attention.h. */
#include "attention.h"
#include "attention_vec.h"

/* Lanes that are computed together: one or two vectors, or half a one. */
typedef struct {
    int32_t head, count; /* key head and number of queries */
    int32_t lanes, kind;
    int32_t low, high;         /* positions low … high - 1 are seen by some of them … */
    int32_t all_low, all_high; /* … and these by all */
    int64_t offset;            /* of its first lane among the unit's */
} group_t;

typedef struct {
    int32_t row, num_lanes, num_groups, low, high;
    group_t groups[MAX_GROUPS];
} unit_t;

/* Where the keys and values at positions first + from … first + to - 1 are, by place in the block, for head 0. */
typedef struct {
    int32_t first, from, to;
    const char *key[BLOCK], *value[BLOCK];
    int32_t head; /* added to the number of a head: keys of another unit may be fetched for other heads */
} keys_t;

/* A thread's memory. Of what has n numbers a lane, a group's part begins at n * group.offset. */
typedef struct {
    float *query;      /* [dim][lanes], or [num_steps][lanes] of pairs of bfloat16 */
    int32_t *position; /* [lanes] */
    int32_t *low;      /* [lanes]: the first position that is seen */
    float *slope;      /* [lanes], times log2(e) */
    float *scores;     /* [BLOCK][lanes of a group] */
    float *weights;    /* the same, or pairs of bfloat16 */
    float *state[2];   /* sums over partitions */
    float *keys;       /* [BLOCK][dim], or [BLOCK][num_steps] of pairs of bfloat16 */
    float *values;     /* [BLOCK][v_dim], or pairs of keys' bfloat16 [BLOCK / 2][v_dim], for tiles [v_dim][BLOCK / 2] */
    /* With tiles, where those of keys begin and the bytes between rows, the lanes that they are shaped for or
     * SHAPE_FEW, 0 if for none, and the processor's modes before. */
    const char *key_rows[BLOCK / 16];
    int64_t key_stride;
    int shape;
    unsigned modes;
} scratch_t;

/* The keys and values of the block to come, for all the unit's heads if those lie side by side, and how much of them
 * was fetched: `at` bytes of those of key `next`. */
typedef struct {
    const keys_t *keys;
    int64_t next, at;
    int64_t key, value, key_size, value_size; /* where they begin in a row, and their sizes */
    int64_t lines;                            /* of a head's row */
} ahead_t;

/* A block of keys, those of it that some of a group's queries see, and what is fetched in the meantime. */
typedef struct {
    const trivet_attention_layer *layer;
    const trivet_attention_scores *how;
    const scratch_t *scratch;
    const group_t *group;
    const keys_t *keys;
    ahead_t *ahead;
    int from, to;
} block_t;

typedef void block_function(const block_t *, float *state);
typedef void merge_function(int64_t v_dim, float *state, const float *part);

/* What is to be fetched of `keys`, for the heads of a unit. */
static ahead_t start_ahead(const call_t *call, const unit_t *unit, const keys_t *keys) {
    const trivet_attention_cache *key = &call->layer->key, *value = &call->layer->value;
    const int64_t item = call->layer->dtype == TRIVET_BF16 ? 2 : 4, first = unit->groups[0].head;
    const int dense = key->head == key->dim * item && value->head == value->dim * item;
    const int64_t heads = dense ? unit->groups[unit->num_groups - 1].head - first + 1 : 1;
    const int64_t dim = key->dim > value->dim ? key->dim : value->dim;
    return (ahead_t){.keys = keys,
                     .next = keys->from,
                     .lines = (dim * item + 63) / 64,
                     .key = (first + keys->head) * key->head,
                     .value = (first + keys->head) * value->head,
                     .key_size = heads * key->dim * item,
                     .value_size = heads * value->dim * item};
}

/* Lines of keys, and of values, that are fetched with a step of turning values, of softening scores and of a product of
 * tiles: 128 in all, those of a head of 64 numbers, most of them where the processor has least else to load. */
enum { FETCH_TURN = 1, FETCH_SOFTEN = 1, FETCH_PRODUCT = 5 };

/* Have `count` times a line of keys and one of values fetched from memory: by turns, which is faster than all keys and
 * then all values. Calls are spread over all that is done for a block, since a processor has few fetches under way at
 * once, and waits where there are more. */
static inline void fetch(ahead_t *ahead, int64_t count) {
    const keys_t *keys = ahead->keys;
    const int64_t key_size = ahead->key_size, value_size = ahead->value_size;
    int64_t next = ahead->next, at = ahead->at;
    for (; count > 0 && next < keys->to; count--) {
        if (at < key_size) __builtin_prefetch(keys->key[next] + ahead->key + at, 0, 2);
        if (at < value_size) __builtin_prefetch(keys->value[next] + ahead->value + at, 0, 2);
        at += 64;
        if (at >= key_size && at >= value_size) at = 0, next++;
    }
    ahead->next = next, ahead->at = at;
}

#include "attention_tiles.h"

/* Products that a score is the sum of: of numbers or of pairs, in tiles of whole steps. */
static inline int64_t num_steps(int pairs, int64_t dim) {
    return !pairs ? dim : HAS_TILES ? round_up(dim, TILE_INPUTS) / 2 : (dim + 1) / 2;
}

#define N FULL
#define PAIRS 0
#define NAME(x) single_full_##x
#include "attention_block.h"

#if FULL == 16
#define N 8
#define PAIRS 0
#define NAME(x) single_half_##x
#include "attention_block.h"
#endif

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1

#define N 16
#define PAIRS 1
#define NAME(x) pair_full_##x
#include "attention_block.h"
#define N 8
#define PAIRS 1
#define NAME(x) pair_half_##x
#include "attention_block.h"

#else
#define HAS_PAIRS 0
#endif

/* Kinds of groups: of half a vector (where there is one), one, two. */
enum { HALF, ONE, TWO };

/* Whether products are of pairs of bfloat16. */
static inline int in_pairs(const call_t *call) { return HAS_PAIRS && call->layer->dtype == TRIVET_BF16; }

#include "attention_few.h"
#include "attention_gather.h"
#include "attention_lanes.h"

static block_function *const block_single[] = {
#if FULL == 16
    single_half_block_1,
#else
    NULL,
#endif
    single_full_block_1, single_full_block_2};

static merge_function *const merges[] = {
#if FULL == 16
    single_half_merge_1,
#else
    NULL,
#endif
    single_full_merge_1, single_full_merge_2};

#if HAS_TILES
static block_function *const block_few[] = {few_block};
static merge_function *const merge_few[] = {few_merge};
#endif

#if HAS_PAIRS
static block_function *const block_pairs[] = {pair_half_block_1, pair_full_block_1, pair_full_block_2};
#endif

/* Lanes of the next group where `count` queries are left; `more`: others came before. */
static inline int32_t padded(int64_t count, int more, int32_t *kind) {
    /* Tiles have one shape in all groups of a unit. */
    if (FULL == 16 && count <= 8 && !(HAS_TILES && more)) return *kind = HALF, 8;
    if (count <= FULL) return *kind = ONE, FULL;
    return *kind = TWO, 2 * FULL;
}

int32_t trivet_attention_lanes(int64_t count) {
    int32_t kind, lanes = (int32_t)(count / (2 * FULL)) * 2 * FULL;
    return count % (2 * FULL) ? lanes + padded(count % (2 * FULL), lanes > 0, &kind) : lanes;
}

int64_t trivet_attention_heads(int64_t count, int64_t most_lanes) {
    const int32_t lanes = trivet_attention_lanes(count);
    /* The next head's whole vectors must not begin in the middle of one. */
    return lanes % FULL == 0 || lanes < FULL ? most_lanes / lanes : 1;
}

void *trivet_attention_begin(const call_t *call) {
    static __thread scratch_t scratch;
    buffers_t *buffers = trivet_attention_buffers();
    if (!buffers) return NULL;
    const int64_t dim = round_up(call->layer->key.dim, 32), v_dim = round_up(call->layer->value.dim, 16);
    const int64_t lanes = call->most_lanes;
    const int64_t sizes[] = {lanes * dim,
                             lanes,
                             lanes,
                             lanes,
                             BLOCK * 2 * FULL,
                             BLOCK * 2 * FULL,
                             BLOCK * dim,
                             BLOCK * v_dim,
                             STATE_SIZE(lanes, v_dim),
                             STATE_SIZE(lanes, v_dim)};
    enum { COUNT = sizeof sizes / sizeof *sizes };
    int64_t total = 0;
    for (int i = 0; i < COUNT; i++) total += round_up(sizes[i], 16);
    float *data = grow(&buffers->scratch, (size_t)total * sizeof(float)), *part[COUNT];
    if (!data) return NULL;
    for (int i = 0; i < COUNT; data += round_up(sizes[i++], 16)) part[i] = data;
    scratch = (scratch_t){.query = part[0],
                          .position = (int32_t *)part[1],
                          .low = (int32_t *)part[2],
                          .slope = part[3],
                          .scores = part[4],
                          .weights = part[5],
                          .keys = part[6],
                          .values = part[7],
                          .state = {part[8], part[9]}};
#if HAS_PAIRS
    /* Weights too small for a float are zeros, which they are for tiles; computing them exactly takes very long. */
    scratch.modes = _mm_getcsr();
    if (in_pairs(call)) _mm_setcsr(scratch.modes | _MM_FLUSH_ZERO_ON);
#endif
    return &scratch;
}

void trivet_attention_end(void *memory) {
    const scratch_t *scratch = memory;
    (void)scratch;
#if HAS_TILES
    if (scratch->shape) _tile_release();
#endif
#if HAS_PAIRS
    _mm_setcsr(scratch->modes);
#endif
}

static void make_unit(const call_t *call, const plan_t *plan, unit_t *unit) {
    const int64_t window = call->how.window, start = first_position(call->step, plan->row);
    unit->row = plan->row;
    unit->num_lanes = unit->num_groups = 0;
    int32_t head = 0, done = 0;
    do {
        group_t *group = &unit->groups[unit->num_groups++];
        const int32_t left = plan->count - done;
        group->head = plan->head + head;
        group->lanes = padded(left, done > 0, &group->kind);
        group->count = left < group->lanes ? left : group->lanes;
        group->offset = unit->num_lanes;
        const int64_t first = start + (plan->first + done) / call->per_head;
        done += group->count;
        const int64_t last = start + (plan->first + done - 1) / call->per_head;
        group->low = (int32_t)first_seen(first, window), group->all_low = (int32_t)first_seen(last, window);
        group->all_high = (int32_t)first + 1, group->high = (int32_t)last + 1;
        unit->num_lanes += group->lanes;
        if (done == plan->count) done = 0, head++;
    } while (head < plan->num_heads);
    unit->low = unit->groups[0].low, unit->high = unit->groups[unit->num_groups - 1].high;
}

/* Where the keys and values of the block at `first` are, of those at positions low … high - 1 of a row. */
static void find_keys(const call_t *call, int32_t row, int64_t first, int64_t low, int64_t high, keys_t *keys) {
    const trivet_attention_cache *key = &call->layer->key, *value = &call->layer->value;
    const int64_t size = call->layer->block_size;
    const int32_t *table = call->step->block_table + row * call->step->table_stride;
    const int from = low > first ? (int)(low - first) : 0, to = high < first + BLOCK ? (int)(high - first) : BLOCK;
    keys->first = (int32_t)first, keys->from = from, keys->to = to, keys->head = 0;
    if (from >= to) return;
    int64_t number = (first + from) / size, place = (first + from) % size;
    for (int n = from; n < to; number++, place = 0) {
        const int run = (int)(size - place < to - n ? size - place : to - n);
        const char *k = key->cache + table[number] * key->block + place * key->token;
        const char *v = value->cache + table[number] * value->block + place * value->token;
        for (int i = 0; i < run; i++, n++, k += key->token, v += value->token) keys->key[n] = k, keys->value[n] = v;
    }
}

/* Where the first keys of a task are. */
static void find_first_keys(const call_t *call, const plan_t *plan, const task_t *task, keys_t *keys) {
    const int64_t start = first_position(call->step, plan->row), begin = (int64_t)task->part * PART;
    const int64_t seen = first_seen(start + plan->first / call->per_head, call->how.window);
    const int64_t low = seen > begin ? seen : begin;
    const int64_t high = start + (plan->first + plan->count - 1) / call->per_head + 1;
    find_keys(call, plan->row, low / BLOCK * BLOCK, low, high, keys);
}

/* The sums of one partition, for all of the unit's lanes; `next` are keys to fetch for later. */
static void attend_part(const call_t *call, const unit_t *unit, scratch_t *scratch, int64_t part,
                        const keys_t *next, float *state) {
    const int64_t v_dim = call->layer->value.dim;
    const int few = are_few(call, unit->groups[0].kind);
    block_function *const *blocks = block_single;
#if HAS_PAIRS
    if (in_pairs(call)) blocks = block_pairs;
#endif
#if HAS_TILES
    if (few) blocks = block_few;
#endif
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        float *out = state + STATE_SIZE(group->offset, v_dim), *most = out + group->lanes * padded_sums(v_dim);
        memset(out, 0, (size_t)STATE_SIZE(group->lanes, v_dim) * sizeof *out);
        for (int lane = 0; lane < group->lanes; lane++) most[lane] = HIDDEN;
    }
    const int64_t begin = part * PART, low = unit->low > begin ? unit->low : begin;
    const int64_t high = unit->high < begin + PART ? unit->high : begin + PART;
    keys_t buffers[2], *keys = &buffers[0], *ahead = &buffers[1];
    int64_t first = low / BLOCK * BLOCK;
    find_keys(call, unit->row, first, low, high, keys);
    for (; first < high; first += BLOCK) {
        /* The block after this one, of the next partition too, is fetched while this one is computed. */
        find_keys(call, unit->row, first + BLOCK, low, unit->high, ahead);
        const keys_t *wanted = ahead->from < ahead->to ? ahead : next;
        ahead_t soon = start_ahead(call, unit, wanted);
        for (int g = 0; g < unit->num_groups; g++) {
            const group_t *group = &unit->groups[g];
            const int fresh = g == 0 || group->head != group[-1].head;
            const int32_t some = group->low - keys->first, end = group->high - keys->first;
            const block_t block = {.layer = call->layer,
                                   .how = &call->how,
                                   .scratch = scratch,
                                   .group = group,
                                   .keys = keys,
                                   .ahead = &soon,
                                   .from = some > keys->from ? some : keys->from,
                                   .to = end < keys->to ? end : keys->to};
            const int once = fresh && (g + 1 == unit->num_groups || group[1].head != group->head);
            if (fresh && call->layer->dtype == TRIVET_BF16)
                gather_bf16(&block, scratch, once, few);
            else if (fresh)
                gather_floats(&block, scratch);
            if (block.from < block.to) blocks[group->kind](&block, state + STATE_SIZE(group->offset, v_dim));
        }
        fetch(&soon, INT64_MAX);
        keys_t *done = keys;
        keys = ahead, ahead = done;
    }
}

static void merge_parts(const call_t *call, const unit_t *unit, float *state, const float *part) {
    const int64_t v_dim = call->layer->value.dim;
    merge_function *const *merge = merges;
#if HAS_TILES
    if (are_few(call, unit->groups[0].kind)) merge = merge_few;
#endif
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        const int64_t offset = STATE_SIZE(group->offset, v_dim);
        merge[group->kind](v_dim, state + offset, part + offset);
    }
}

void trivet_attention_task(const call_t *call, plan_t *plans, const task_t *task, const task_t *next, void *memory,
                           float *states) {
    plan_t *plan = &plans[task->unit];
    const int64_t v_dim = call->layer->value.dim;
    scratch_t *scratch = memory;
    unit_t unit;
    keys_t next_keys = {0};
    make_unit(call, plan, &unit);
#if HAS_TILES
    const int shape = are_few(call, unit.groups[0].kind) ? SHAPE_FEW : unit.groups[0].kind == HALF ? 8 : FULL;
    if (in_pairs(call) && scratch->shape != shape) {
        scratch->shape = shape;
        if (shape == SHAPE_FEW)
            shape_few();
        else
            shape_tiles(shape);
    }
#endif
    load_queries(call, plan, &unit, scratch);
    if (next) {
        const plan_t *next_plan = &plans[next->unit];
        find_first_keys(call, next_plan, next, &next_keys);
        next_keys.head = next_plan->head - plan->head;
    }
    const int64_t size = round_up(STATE_SIZE((int64_t)unit.num_lanes, v_dim), 16);
    float *shared = plan->state < 0 ? NULL : states + plan->state;
    for (int32_t i = 0; i < task->num_parts; i++) {
        const int32_t part = task->part + i;
        float *state = shared ? shared + (part - plan->first_part) * size : scratch->state[i > 0];
        attend_part(call, &unit, scratch, part, &next_keys, state);
        if (!shared && i) merge_parts(call, &unit, scratch->state[0], scratch->state[1]);
    }
    if (!shared) {
        store(call, plan, &unit, scratch->state[0]);
    } else if (!__atomic_sub_fetch(&plan->left, 1, __ATOMIC_ACQ_REL)) {
        for (int32_t i = 1; i < plan->num_parts; i++) merge_parts(call, &unit, shared, shared + i * size);
        store(call, plan, &unit, shared);
    }
}
