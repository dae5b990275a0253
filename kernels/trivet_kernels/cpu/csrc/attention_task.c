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
    float *query;      /* [dim][lanes], or pairs of bfloat16 */
    int32_t *position; /* [lanes] */
    int32_t *low;      /* [lanes]: the first position that is seen */
    float *slope;      /* [lanes], times log2(e) */
    float *scores;     /* [BLOCK][lanes of a group] */
    float *weights;    /* the same, or pairs of bfloat16 */
    float *state[2];   /* sums over partitions */
    float *keys;       /* [BLOCK][dim], or pairs of bfloat16 [BLOCK][dim / 2] */
    float *values;     /* [BLOCK][v_dim], or pairs of keys' bfloat16 [BLOCK / 2][v_dim] */
    float *row;        /* [v_dim] */
} scratch_t;

typedef void block_function(const group_t *, const scratch_t *, const keys_t *, const keys_t *ahead, const scores_t *,
                            const trivet_attention_layer *, float *state);
typedef void merge_function(int64_t v_dim, float *state, const float *part);

/* Have a head's keys or values of the block `ahead` fetched from memory, numbers from … to - 1 of them. */
static inline void fetch(const keys_t *ahead, int values, int from, int to, const trivet_attention_layer *layer,
                         int64_t head) {
    if (!ahead) return;
    const trivet_attention_cache *cache = values ? &layer->value : &layer->key;
    const char *const *rows = values ? ahead->value : ahead->key;
    const int64_t size = cache->dim * (layer->dtype == TRIVET_BF16 ? 2 : 4);
    if (from < ahead->from) from = ahead->from;
    if (to > ahead->to) to = ahead->to;
    for (int n = from; n < to; n++)
        for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(rows[n] + (head + ahead->head) * cache->head + at, 0, 2);
}

#define N FULL
#define PAIRS 0
#define NAME(x) single_full_##x
#include "attention_tile.h"

#if FULL == 16
#define N 8
#define PAIRS 0
#define NAME(x) single_half_##x
#include "attention_tile.h"
#endif

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1

/* The bfloat16 of two vectors of floats, side by side in each lane. */
ALWAYS_INLINE vi16 pair_full_pair(vf16 even, vf16 odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vi16)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

ALWAYS_INLINE vi8 pair_half_pair(vf8 even, vf8 odd) {
    const __m256i order = _mm256_set_epi16(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    return (vi8)_mm256_permutexvar_epi16(order, (__m256i)_mm256_cvtne2ps_pbh((__m256)odd, (__m256)even));
}

/* The numbers of two rows side by side. */
ALWAYS_INLINE void interleave(const bf16_t *even, const bf16_t *odd, int64_t size, uint32_t *restrict out) {
    const __m512i step = _mm512_set1_epi16(16);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, step);
    int64_t i = 0;
    for (; i + 32 <= size; i += 32) {
        const __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
        _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(a, high, b));
    }
    for (; i < size; i++) out[i] = even[i] | (uint32_t)odd[i] << 16;
}

#define N 16
#define PAIRS 1
#define NAME(x) pair_full_##x
#include "attention_tile.h"
#define N 8
#define PAIRS 1
#define NAME(x) pair_half_##x
#include "attention_tile.h"

#else
#define HAS_PAIRS 0
#endif

/* By kind: half a vector (where there is one), one, two. */
enum { HALF, ONE, TWO };

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

#if HAS_PAIRS
static block_function *const block_pairs[] = {pair_half_block_1, pair_full_block_1, pair_full_block_2};
#endif

/* Whether products are of pairs of bfloat16. */
static inline int in_pairs(const call_t *call) { return HAS_PAIRS && call->layer->dtype == TRIVET_BF16; }

static inline int32_t padded(int64_t count, int32_t *kind) {
    if (FULL == 16 && count <= 8) return *kind = HALF, 8;
    if (count <= FULL) return *kind = ONE, FULL;
    return *kind = TWO, 2 * FULL;
}

int32_t trivet_attention_lanes(int64_t count) {
    int32_t kind, lanes = (int32_t)(count / (2 * FULL)) * 2 * FULL;
    return count % (2 * FULL) ? lanes + padded(count % (2 * FULL), &kind) : lanes;
}

int32_t trivet_attention_heads(int64_t count) {
    const int32_t lanes = trivet_attention_lanes(count);
    /* The next head's whole vectors must not begin in the middle of one. */
    return lanes % FULL == 0 || lanes < FULL ? MAX_LANES / lanes : 1;
}

void *trivet_attention_scratch(const call_t *call) {
    static __thread scratch_t scratch;
    buffers_t *buffers = trivet_attention_buffers();
    if (!buffers) return NULL;
    const int64_t dim = round_up(call->layer->key.dim, 16), v_dim = round_up(call->layer->value.dim, 16);
    const int64_t sizes[] = {MAX_LANES * dim,  MAX_LANES,        MAX_LANES,
                             MAX_LANES,        BLOCK * 2 * FULL, BLOCK * 2 * FULL,
                             BLOCK * dim,      BLOCK * v_dim,    STATE_SIZE(MAX_LANES, v_dim),
                             STATE_SIZE(MAX_LANES, v_dim),       v_dim};
    enum { COUNT = sizeof sizes / sizeof *sizes };
    int64_t total = 0;
    for (int i = 0; i < COUNT; i++) total += round_up(sizes[i], 16);
    float *data = grow(&buffers->scratch, (size_t)total * sizeof(float)), *part[COUNT];
    if (!data) return NULL;
    for (int i = 0; i < COUNT; data += round_up(sizes[i++], 16)) part[i] = data;
    scratch = (scratch_t){part[0], (int32_t *)part[1], (int32_t *)part[2], part[3], part[4],
                          part[5], {part[8], part[9]}, part[6],           part[7],           part[10]};
    return &scratch;
}

static void make_unit(const call_t *call, const plan_t *plan, unit_t *unit) {
    const int64_t window = call->how.window, start = first_position(call->step, plan->row);
    unit->row = plan->row;
    unit->num_lanes = unit->num_groups = 0;
    for (int32_t head = 0, done = 0; head < plan->num_heads;) {
        group_t *group = &unit->groups[unit->num_groups++];
        const int32_t left = plan->count - done;
        group->head = plan->head + head;
        group->lanes = padded(left, &group->kind);
        group->count = left < group->lanes ? left : group->lanes;
        group->offset = unit->num_lanes;
        const int64_t first = start + (plan->first + done) / call->per_head;
        done += group->count;
        const int64_t last = start + (plan->first + done - 1) / call->per_head;
        group->low = (int32_t)first_seen(first, window), group->all_low = (int32_t)first_seen(last, window);
        group->all_high = (int32_t)first + 1, group->high = (int32_t)last + 1;
        unit->num_lanes += group->lanes;
        if (done == plan->count) done = 0, head++;
    }
    unit->low = unit->groups[0].low, unit->high = unit->groups[unit->num_groups - 1].high;
}

/* One query into its lane. */
static void load_query(const call_t *call, const char *query, int64_t lanes, float *to) {
    const int64_t dim = call->layer->key.dim;
    if (call->layer->dtype == TRIVET_F32) {
        const float *from = (const float *)query;
        for (int64_t i = 0; i < dim; i++) to[i * lanes] = from[i];
        return;
    }
    const bf16_t *from = (const bf16_t *)query;
    if (!in_pairs(call)) {
        for (int64_t i = 0; i < dim; i++) to[i * lanes] = bf16_to_float(from[i]);
        return;
    }
    for (int64_t i = 0; i < dim / 2; i++) memcpy(to + i * lanes, from + 2 * i, 4);
    if (dim % 2) {
        const bf16_t pair[2] = {from[dim - 1], 0};
        memcpy(to + dim / 2 * lanes, pair, 4);
    }
}

/* Lay the unit's queries out in lanes, with what each sees. Lanes without a query repeat the last one's place. */
static void load_queries(const call_t *call, const plan_t *plan, const unit_t *unit, const scratch_t *scratch) {
    const int64_t dim = call->layer->key.dim, item = call->layer->dtype == TRIVET_BF16 ? 2 : 4;
    const int64_t steps = in_pairs(call) ? (dim + 1) / 2 : dim;
    const int64_t start = call->step->query_start[unit->row], begin = first_position(call->step, unit->row);
    int64_t token = 0, head = 0;
    int32_t position = 0, low = 0;
    float slope = 0.0f;
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        float *to = scratch->query + steps * group->offset;
        if (g == 0 || group->head != group[-1].head)
            token = plan->first / call->per_head, head = plan->first % call->per_head;
        if (group->count < group->lanes) memset(to, 0, (size_t)(steps * group->lanes) * sizeof *to);
        for (int64_t lane = 0; lane < group->lanes; lane++) {
            if (lane < group->count) {
                const int64_t number = group->head * call->per_head + head;
                const int64_t at = (start + token) * call->query.token + number * call->query.head;
                load_query(call, call->query.data + at * item, group->lanes, to + lane);
                if (head == 0 || lane == 0) {
                    position = (int32_t)(begin + token);
                    low = (int32_t)first_seen(position, call->how.window);
                }
                if (call->how.slopes) slope = call->how.slopes[number] * LOG2E;
                if (++head == call->per_head) head = 0, token++;
            }
            scratch->position[group->offset + lane] = position;
            scratch->low[group->offset + lane] = low;
            scratch->slope[group->offset + lane] = slope;
        }
    }
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

/* A short memcpy, in vectors: a call takes as long as what it copies. */
ALWAYS_INLINE void copy(void *to, const void *from, int64_t size) {
    typedef float vector __attribute__((vector_size(4 * FULL), may_alias, aligned(1)));
    int64_t at = 0;
    for (; at + (int64_t)sizeof(vector) <= size; at += sizeof(vector))
        *(vector *)((char *)to + at) = *(const vector *)((const char *)from + at);
    if (at < size) memcpy((char *)to + at, (const char *)from + at, (size_t)(size - at));
}

/* Bring a head's keys and values of a block, in float32, into the form that products take: beside each other, so that
 * they do not fight for places in the processor's cache as rows at distances of a power of two do. */
static void gather_floats(const trivet_attention_layer *layer, const scratch_t *scratch, const keys_t *keys,
                          int64_t head) {
    const int64_t dim = layer->key.dim, v_dim = layer->value.dim;
    for (int n = keys->from; n < keys->to; n++) {
        copy(scratch->keys + n * dim, keys->key[n] + head * layer->key.head, dim * 4);
        copy(scratch->values + n * v_dim, keys->value[n] + head * layer->value.head, v_dim * 4);
    }
}

/* The same for bfloat16. */
#if HAS_PAIRS
static void gather_bf16(const trivet_attention_layer *layer, const scratch_t *scratch, const keys_t *keys,
                        int64_t head) {
    const int64_t dim = layer->key.dim, v_dim = layer->value.dim, steps = (dim + 1) / 2;
    for (int n = keys->from; n < keys->to; n++) {
        bf16_t *key = (bf16_t *)(scratch->keys + n * steps);
        copy(key, keys->key[n] + head * layer->key.head, dim * 2);
        if (dim % 2) key[dim] = 0;
    }
    for (int i = keys->from / 2; i <= (keys->to - 1) / 2; i++) {
        uint32_t *pairs = (uint32_t *)(scratch->values + i * v_dim);
        const int has_even = 2 * i >= keys->from, has_odd = 2 * i + 1 < keys->to;
        const bf16_t *even = (const bf16_t *)(keys->value[2 * i + !has_even] + head * layer->value.head);
        const bf16_t *odd = (const bf16_t *)(keys->value[2 * i + has_odd] + head * layer->value.head);
        if (has_even && has_odd) {
            interleave(even, odd, v_dim, pairs);
        } else {
            const uint32_t even_bits = has_even ? 0xffffu : 0, odd_bits = has_odd ? 0xffffu : 0;
            for (int64_t d = 0; d < v_dim; d++) pairs[d] = (even[d] & even_bits) | (odd[d] & odd_bits) << 16;
        }
    }
}
#else
static void gather_bf16(const trivet_attention_layer *layer, const scratch_t *scratch, const keys_t *keys,
                        int64_t head) {
    const int64_t dim = layer->key.dim, v_dim = layer->value.dim;
    for (int n = keys->from; n < keys->to; n++) {
        float *restrict key = scratch->keys + n * dim, *restrict value = scratch->values + n * v_dim;
        const bf16_t *from_key = (const bf16_t *)(keys->key[n] + head * layer->key.head);
        const bf16_t *from_value = (const bf16_t *)(keys->value[n] + head * layer->value.head);
        for (int64_t i = 0; i < dim; i++) key[i] = bf16_to_float(from_key[i]);
        for (int64_t i = 0; i < v_dim; i++) value[i] = bf16_to_float(from_value[i]);
    }
}
#endif

/* Where the first keys of a task are. */
static void find_first_keys(const call_t *call, const plan_t *plan, const task_t *task, keys_t *keys) {
    const int64_t start = first_position(call->step, plan->row), begin = (int64_t)task->part * PART;
    const int64_t seen = first_seen(start + plan->first / call->per_head, call->how.window);
    const int64_t low = seen > begin ? seen : begin;
    const int64_t high = start + (plan->first + plan->count - 1) / call->per_head + 1;
    find_keys(call, plan->row, low / BLOCK * BLOCK, low, high, keys);
}

/* The sums of one partition, for all of the unit's lanes; `next` are keys to fetch for later. */
static void attend_part(const call_t *call, const unit_t *unit, const scratch_t *scratch, int64_t part,
                        const keys_t *next, float *state) {
    const int64_t v_dim = call->layer->value.dim;
    block_function *const *blocks = block_single;
#if HAS_PAIRS
    if (in_pairs(call)) blocks = block_pairs;
#endif
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        float *out = state + STATE_SIZE(group->offset, v_dim), *most = out + group->lanes * v_dim;
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
        for (int g = 0; g < unit->num_groups; g++) {
            const group_t *group = &unit->groups[g];
            const int fresh = g == 0 || group->head != group[-1].head;
            if (fresh && call->layer->dtype == TRIVET_BF16)
                gather_bf16(call->layer, scratch, keys, group->head);
            else if (fresh)
                gather_floats(call->layer, scratch, keys, group->head);
            blocks[group->kind](group, scratch, keys, fresh ? wanted : NULL, &call->how, call->layer,
                                state + STATE_SIZE(group->offset, v_dim));
        }
        keys_t *done = keys;
        keys = ahead, ahead = done;
    }
}

static void merge_parts(const unit_t *unit, int64_t v_dim, float *state, const float *part) {
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        const int64_t offset = STATE_SIZE(group->offset, v_dim);
        merges[group->kind](v_dim, state + offset, part + offset);
    }
}

static void narrow(const float *restrict from, int64_t size, bf16_t *restrict to) {
    int64_t i = 0;
#if defined(__AVX512BF16__)
    for (; i + 16 <= size; i += 16)
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
#endif
    for (; i < size; i++) to[i] = float_to_bf16(from[i]);
}

static void store(const call_t *call, const plan_t *plan, const unit_t *unit, const scratch_t *scratch,
                  const float *state) {
    const int64_t v_dim = call->layer->value.dim, start = call->step->query_start[unit->row];
    int64_t token = 0, head = 0;
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        if (g == 0 || group->head != group[-1].head)
            token = plan->first / call->per_head, head = plan->first % call->per_head;
        const float *sums = state + STATE_SIZE(group->offset, v_dim);
        const int64_t lanes = group->lanes;
        for (int64_t lane = 0; lane < group->count; lane++) {
            const int64_t number = group->head * call->per_head + head;
            const float most = sums[v_dim * lanes + lane];
            float total = sums[(v_dim + 1) * lanes + lane], factor = 1.0f;
            if (call->how.sinks) {
                const float sink = call->how.sinks[number] * LOG2E, top = sink > most ? sink : most;
                factor = exp2f(most - top);
                total = total * factor + exp2f(sink - top);
            }
            factor /= total;
            const int64_t to = ((start + token) * call->num_heads + number) * v_dim;
            const int wide = call->layer->dtype == TRIVET_F32;
            float *row = wide ? (float *)call->out + to : scratch->row;
            for (int64_t d = 0; d < v_dim; d++) row[d] = sums[d * lanes + lane] * factor;
            if (!wide) narrow(row, v_dim, (bf16_t *)call->out + to);
            if (++head == call->per_head) head = 0, token++;
        }
    }
}

void trivet_attention_task(const call_t *call, plan_t *plans, const task_t *task, const task_t *next, void *memory,
                           float *states) {
    plan_t *plan = &plans[task->unit];
    const int64_t v_dim = call->layer->value.dim;
    const scratch_t *scratch = memory;
    unit_t unit;
    keys_t next_keys = {0};
    make_unit(call, plan, &unit);
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
        if (!shared && i) merge_parts(&unit, v_dim, scratch->state[0], scratch->state[1]);
    }
    if (!shared) {
        store(call, plan, &unit, scratch, scratch->state[0]);
    } else if (!__atomic_sub_fetch(&plan->left, 1, __ATOMIC_ACQ_REL)) {
        for (int32_t i = 1; i < plan->num_parts; i++) merge_parts(&unit, v_dim, shared, shared + i * size);
        store(call, plan, &unit, scratch, shared);
    }
}
