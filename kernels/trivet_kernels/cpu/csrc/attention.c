/* Paged attention for a mixed batch: what is computed by whom. See attention.h. */
#include "attention.h"
#include "attention_vec.h"

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

#define N 16
#define PAIRS 1
#define NAME(x) pair_full_##x
#include "attention_tile.h"
#define N 8
#define PAIRS 1
#define NAME(x) pair_half_##x
#include "attention_tile.h"

#define HAS_PAIRS 1
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
#else
static block_function *const *const block_pairs = NULL;
#endif

typedef struct {
    const trivet_attention_step *step;
    const trivet_attention_layer *layer;
    rows_t query;
    scores_t how;
    char *out;
    int64_t num_heads, per_head; /* query heads, and those of them that share a key head */
    int pairs;                   /* products are of pairs of bfloat16 */
} call_t;

/* Queries of one row and key head, first … first + count - 1 of the row's (token, head), and the keys they see. */
typedef struct {
    int32_t row, head, count, num_lanes, num_groups, low, high;
    int64_t first;
    group_t groups[MAX_GROUPS];
} unit_t;

/* Where the units' states are, when their partitions are computed by several tasks. */
typedef struct {
    int32_t row, head, count;
    int64_t first;
    int32_t first_part, num_parts;
    int64_t state; /* offset in floats of the first partition's, -1: computed by one task */
    int32_t left;  /* tasks that are not done */
} plan_t;

typedef struct {
    int32_t unit, part, num_parts;
} task_t;

/* A buffer that only grows; one for each thread and use, for the life of the thread. */
typedef struct {
    void *data;
    size_t size;
} buffer_t;

static void *grow(buffer_t *buffer, size_t size) {
    if (buffer->size < size) {
        free(buffer->data);
        size = (size + size / 2 + 63) / 64 * 64;
        buffer->data = aligned_alloc(64, size);
        buffer->size = buffer->data ? size : 0;
    }
    return buffer->data;
}

/* The first position that a query at `position` sees. */
static inline int64_t first_seen(int64_t position, int64_t window) {
    if (window == 0) return 0;
    if (window < 0) return position / -window * -window;
    return position < window ? 0 : position - window + 1;
}

static inline int32_t padded(int64_t count, int32_t *kind) {
    if (FULL == 16 && count <= 8) return *kind = HALF, 8;
    if (count <= FULL) return *kind = ONE, FULL;
    return *kind = TWO, 2 * FULL;
}

static inline int32_t padded_lanes(int64_t count) {
    int32_t kind, lanes = (int32_t)(count / (2 * FULL)) * 2 * FULL;
    return count % (2 * FULL) ? lanes + padded(count % (2 * FULL), &kind) : lanes;
}

/* Position in the row's context of its query number `index` (of pairs of token and head). */
static inline int64_t position_of(const call_t *call, int32_t row, int64_t index) {
    const int32_t *starts = call->step->query_start;
    return call->step->seq_lens[row] - (starts[row + 1] - starts[row]) + index / call->per_head;
}

static void make_unit(const call_t *call, const plan_t *plan, unit_t *unit) {
    const int64_t window = call->how.window;
    unit->row = plan->row, unit->head = plan->head, unit->count = plan->count, unit->first = plan->first;
    unit->num_lanes = unit->num_groups = 0;
    int64_t done = 0;
    do {
        group_t *group = &unit->groups[unit->num_groups++];
        const int64_t left = unit->count - done;
        group->first = done;
        group->lanes = padded(left, &group->kind);
        group->count = left < group->lanes ? left : group->lanes;
        group->offset = unit->num_lanes;
        const int64_t first = position_of(call, unit->row, unit->first + done);
        done += group->count;
        const int64_t last = position_of(call, unit->row, unit->first + done - 1);
        group->low = (int32_t)first_seen(first, window), group->all_low = (int32_t)first_seen(last, window);
        group->all_high = (int32_t)first + 1, group->high = (int32_t)last + 1;
        unit->num_lanes += group->lanes;
    } while (done < unit->count);
    unit->low = unit->groups[0].low, unit->high = unit->groups[unit->num_groups - 1].high;
}

/* One thread's memory for a tile. */
typedef struct {
    tile_t tile;
    float *state[2], *sums;
    char *keys, *values; /* [BLOCK] rows each: what cannot be read as it is in the cache */
} scratch_t;

static inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

static int make_scratch(const call_t *call, scratch_t *scratch) {
    static __thread buffer_t buffer;
    const int64_t dim = round_up(call->layer->key.dim, 16), v_dim = round_up(call->layer->value.dim, 16);
    const int64_t sizes[] = {MAX_LANES * dim,
                             MAX_LANES,
                             MAX_LANES,
                             MAX_LANES,
                             BLOCK * 2 * FULL,
                             BLOCK * 2 * FULL,
                             STATE_SIZE(MAX_LANES, v_dim),
                             STATE_SIZE(MAX_LANES, v_dim),
                             BLOCK * dim,
                             BLOCK * v_dim};
    float *parts[10];
    int64_t total = 0;
    for (int i = 0; i < 10; i++) total += round_up(sizes[i], 16);
    float *data = grow(&buffer, (size_t)total * sizeof(float));
    if (!data) return -1;
    for (int i = 0; i < 10; i++) parts[i] = data, data += round_up(sizes[i], 16);
    scratch->tile = (tile_t){.query = parts[0],
                             .position = (int32_t *)parts[1],
                             .low = (int32_t *)parts[2],
                             .slope = parts[3],
                             .scores = parts[4],
                             .weights = parts[5]};
    scratch->state[0] = parts[6], scratch->state[1] = parts[7];
    scratch->keys = (char *)parts[8], scratch->values = (char *)parts[9];
    return 0;
}

/* Lay the unit's queries out in lanes, with what each sees. Lanes without a query repeat the last one's place. */
static void load_queries(const call_t *call, const unit_t *unit, const tile_t *tile) {
    const int64_t dim = call->layer->key.dim, per_head = call->per_head;
    const int64_t start = call->step->query_start[unit->row];
    const int narrow = call->layer->dtype == TRIVET_BF16;
    const int64_t steps = call->pairs ? (dim + 1) / 2 : dim;
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        float *to = tile->query + steps * group->offset;
        for (int64_t lane = 0; lane < group->lanes; lane++) {
            const int empty = lane >= group->count;
            const int64_t index = unit->first + group->first + (empty ? group->count - 1 : lane);
            const int64_t head = unit->head * per_head + index % per_head;
            const int64_t at = (start + index / per_head) * call->query.token + head * call->query.head;
            const int64_t position = position_of(call, unit->row, index), slot = group->offset + lane;
            tile->position[slot] = (int32_t)position;
            tile->low[slot] = (int32_t)first_seen(position, call->how.window);
            tile->slope[slot] = call->how.slopes ? call->how.slopes[head] * LOG2E : 0.0f;
            if (empty) {
                for (int64_t i = 0; i < steps; i++) to[i * group->lanes + lane] = 0.0f;
            } else if (!narrow) {
                const float *from = (const float *)call->query.data + at;
                for (int64_t i = 0; i < dim; i++) to[i * group->lanes + lane] = from[i];
            } else {
                const bf16_t *from = (const bf16_t *)call->query.data + at;
                if (!call->pairs) {
                    for (int64_t i = 0; i < dim; i++) to[i * group->lanes + lane] = bf16_to_float(from[i]);
                } else {
                    uint32_t *pairs = (uint32_t *)to;
                    for (int64_t i = 0; i < dim / 2; i++)
                        pairs[i * group->lanes + lane] = from[2 * i] | (uint32_t)from[2 * i + 1] << 16;
                    if (dim % 2) pairs[dim / 2 * group->lanes + lane] = from[dim - 1];
                }
            }
        }
    }
}

/* Find the keys and values at positions from … to - 1 of a block, and bring those that are not read as they are into
 * the form that products take. */
static void find_keys(const call_t *call, const unit_t *unit, const scratch_t *scratch, int64_t first, int64_t low,
                      int64_t high, keys_t *keys) {
    const trivet_attention_cache *key = &call->layer->key, *value = &call->layer->value;
    const int64_t size = call->layer->block_size;
    const int32_t *table = call->step->block_table + unit->row * call->step->table_stride;
    const int from = low > first ? (int)(low - first) : 0, to = high < first + BLOCK ? (int)(high - first) : BLOCK;
    keys->first = (int32_t)first, keys->from = from, keys->to = to;
    int64_t number = (first + from) / size, place = (first + from) % size;
    for (int n = from; n < to; number++, place = 0) {
        const int run = (int)(size - place < to - n ? size - place : to - n);
        const char *k = key->cache + table[number] * key->block + place * key->token + unit->head * key->head;
        const char *v = value->cache + table[number] * value->block + place * value->token + unit->head * value->head;
        for (int i = 0; i < run; i++, n++, k += key->token, v += value->token) keys->key[n] = k, keys->value[n] = v;
    }
    if (call->layer->dtype != TRIVET_BF16) return;
    if (!call->pairs) {
        for (int n = from; n < to; n++) {
            float *k = (float *)scratch->keys + n * key->dim, *v = (float *)scratch->values + n * value->dim;
            const bf16_t *from_k = keys->key[n], *from_v = keys->value[n];
            for (int64_t i = 0; i < key->dim; i++) k[i] = bf16_to_float(from_k[i]);
            for (int64_t i = 0; i < value->dim; i++) v[i] = bf16_to_float(from_v[i]);
            keys->key[n] = k, keys->value[n] = v;
        }
        return;
    }
    if (key->dim % 2) {
        for (int n = from; n < to; n++) {
            bf16_t *k = (bf16_t *)scratch->keys + n * (key->dim + 1);
            memcpy(k, keys->key[n], (size_t)key->dim * sizeof *k);
            k[key->dim] = 0;
            keys->key[n] = k;
        }
    }
    for (int i = from / 2; i <= (to - 1) / 2; i++) {
        uint32_t *restrict pairs = (uint32_t *)scratch->values + i * value->dim;
        const bf16_t *even = 2 * i >= from ? keys->value[2 * i] : NULL;
        const bf16_t *odd = 2 * i + 1 < to ? keys->value[2 * i + 1] : NULL;
        if (even && odd)
            for (int64_t d = 0; d < value->dim; d++) pairs[d] = even[d] | (uint32_t)odd[d] << 16;
        else if (even)
            for (int64_t d = 0; d < value->dim; d++) pairs[d] = even[d];
        else
            for (int64_t d = 0; d < value->dim; d++) pairs[d] = (uint32_t)odd[d] << 16;
        keys->value[i] = pairs; /* i <= 2 * i: nothing that is still needed */
    }
}

/* The sums of one partition, for all of the unit's lanes. */
static void attend_part(const call_t *call, const unit_t *unit, const scratch_t *scratch, int64_t part, float *state) {
    const int64_t v_dim = call->layer->value.dim;
    block_function *const *blocks = call->pairs ? block_pairs : block_single;
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        float *out = state + STATE_SIZE(group->offset, v_dim), *most = out + group->lanes * v_dim;
        memset(out, 0, (size_t)STATE_SIZE(group->lanes, v_dim) * sizeof *out);
        for (int lane = 0; lane < group->lanes; lane++) most[lane] = HIDDEN;
    }
    const int64_t begin = part * PART, low = unit->low > begin ? unit->low : begin;
    const int64_t high = unit->high < begin + PART ? unit->high : begin + PART;
    for (int64_t first = low / BLOCK * BLOCK; first < high; first += BLOCK) {
        keys_t keys;
        find_keys(call, unit, scratch, first, low, high, &keys);
        for (int g = 0; g < unit->num_groups; g++) {
            const group_t *group = &unit->groups[g];
            blocks[group->kind](group, &scratch->tile, &keys, &call->how, call->layer->key.dim, v_dim,
                                state + STATE_SIZE(group->offset, v_dim));
        }
    }
}

static void merge_parts(const unit_t *unit, int64_t v_dim, float *state, const float *part) {
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        const int64_t offset = STATE_SIZE(group->offset, v_dim);
        merges[group->kind](v_dim, state + offset, part + offset);
    }
}

static void store(const call_t *call, const unit_t *unit, const float *state) {
    const int64_t v_dim = call->layer->value.dim, per_head = call->per_head;
    const int64_t start = call->step->query_start[unit->row];
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        const float *sums = state + STATE_SIZE(group->offset, v_dim);
        const int64_t lanes = group->lanes;
        for (int64_t lane = 0; lane < group->count; lane++) {
            const int64_t index = unit->first + group->first + lane, head = unit->head * per_head + index % per_head;
            const float most = sums[v_dim * lanes + lane];
            float total = sums[(v_dim + 1) * lanes + lane], factor = 1.0f;
            if (call->how.sinks) {
                const float sink = call->how.sinks[head] * LOG2E, top = sink > most ? sink : most;
                factor = exp2f(most - top);
                total = total * factor + exp2f(sink - top);
            }
            factor /= total;
            const int64_t to = ((start + index / per_head) * call->num_heads + head) * v_dim;
            if (call->layer->dtype == TRIVET_BF16) {
                bf16_t *out = (bf16_t *)call->out + to;
                for (int64_t d = 0; d < v_dim; d++) out[d] = float_to_bf16(sums[d * lanes + lane] * factor);
            } else {
                float *out = (float *)call->out + to;
                for (int64_t d = 0; d < v_dim; d++) out[d] = sums[d * lanes + lane] * factor;
            }
        }
    }
}

static void run_task(const call_t *call, plan_t *plan, const task_t *task, const scratch_t *scratch, float *states) {
    const int64_t v_dim = call->layer->value.dim;
    unit_t unit;
    make_unit(call, plan, &unit);
    load_queries(call, &unit, &scratch->tile);
    if (plan->state < 0) {
        float *state = scratch->state[0];
        for (int32_t i = 0; i < task->num_parts; i++) {
            attend_part(call, &unit, scratch, task->part + i, scratch->state[i > 0]);
            if (i) merge_parts(&unit, v_dim, state, scratch->state[1]);
        }
        store(call, &unit, state);
        return;
    }
    const int64_t size = round_up(STATE_SIZE((int64_t)unit.num_lanes, v_dim), 16);
    float *state = states + plan->state;
    for (int32_t i = task->part - plan->first_part; i < task->part - plan->first_part + task->num_parts; i++)
        attend_part(call, &unit, scratch, plan->first_part + i, state + i * size);
    if (__atomic_sub_fetch(&plan->left, 1, __ATOMIC_ACQ_REL)) return;
    for (int32_t i = 1; i < plan->num_parts; i++) merge_parts(&unit, v_dim, state, state + i * size);
    store(call, &unit, state);
}

/* The work of one call, cut into tasks. */
typedef struct {
    plan_t *plans;
    task_t *tasks;
    float *states;
    int64_t num_tasks, num_threads;
} work_t;

/* Lanes times keys that a thread computes in about the time that it takes to wake another one. */
enum { MANY = 1 << 14 };

static int64_t weight_of(const plan_t *plan) {
    return (int64_t)padded_lanes(plan->count) * plan->num_parts;
}

static int make_work(const call_t *call, work_t *work) {
    static __thread buffer_t plan_buffer, task_buffer, state_buffer;
    const trivet_attention_step *step = call->step;
    const int64_t heads = call->layer->num_kv_heads, v_dim = call->layer->value.dim;
    int64_t num_units = 0;
    for (int64_t row = 0; row < step->num_rows; row++) {
        const int64_t count = (step->query_start[row + 1] - step->query_start[row]) * call->per_head;
        num_units += (count + MAX_LANES - 1) / MAX_LANES * heads;
    }
    plan_t *plans = work->plans = grow(&plan_buffer, (size_t)num_units * sizeof(plan_t) + 64);
    if (!plans) return -1;
    int64_t unit = 0, total = 0, keys = 0;
    for (int32_t row = 0; row < step->num_rows; row++) {
        const int64_t count = (step->query_start[row + 1] - step->query_start[row]) * call->per_head;
        /* The last queries see most: they come first, so that the small rest is what threads share at the end. */
        for (int64_t tile = (count + MAX_LANES - 1) / MAX_LANES - 1; tile >= 0; tile--) {
            const int64_t first = tile * MAX_LANES, left = count - first;
            const int32_t size = (int32_t)(left < MAX_LANES ? left : MAX_LANES);
            const int64_t low = first_seen(position_of(call, row, first), call->how.window);
            const int64_t high = position_of(call, row, first + size - 1) + 1;
            for (int32_t head = 0; head < heads; head++) {
                plan_t *plan = &plans[unit++];
                *plan = (plan_t){.row = row, .head = head, .count = size, .first = first, .state = -1};
                plan->first_part = (int32_t)(low / PART);
                plan->num_parts = (int32_t)((high - 1) / PART) + 1 - plan->first_part;
                total += weight_of(plan);
                keys += (high - low) * padded_lanes(size);
            }
        }
    }
    const int64_t useful = keys * (call->layer->key.dim + v_dim) / 128 / MANY + 1;
    work->num_threads = step->num_threads < useful ? step->num_threads : useful;
    const int64_t share = total / (work->num_threads * 4) + 1;
    int64_t num_tasks = 0, states = 0;
    for (int64_t i = 0; i < num_units; i++) {
        plan_t *plan = &plans[i];
        const int64_t weight = weight_of(plan);
        plan->left = 1;
        if (work->num_threads > 1 && weight > share && plan->num_parts > 1) {
            const int64_t each = share * plan->num_parts / weight > 1 ? share * plan->num_parts / weight : 1;
            plan->left = (int32_t)((plan->num_parts + each - 1) / each);
            plan->state = states;
            states += round_up(STATE_SIZE((int64_t)padded_lanes(plan->count), v_dim), 16) * plan->num_parts;
        }
        num_tasks += plan->left;
    }
    task_t *tasks = work->tasks = grow(&task_buffer, (size_t)num_tasks * sizeof(task_t) + 64);
    work->states = grow(&state_buffer, (size_t)states * sizeof(float) + 64);
    if (!tasks || !work->states) return -1;
    for (int64_t i = 0; i < num_units; i++) {
        const plan_t *plan = &plans[i];
        const int32_t each = (plan->num_parts + plan->left - 1) / plan->left;
        for (int32_t part = 0, n = 0; n < plan->left; n++, part += each) {
            const int32_t rest = plan->num_parts - part;
            *tasks++ = (task_t){(int32_t)i, plan->first_part + part, rest < each ? (rest > 0 ? rest : 0) : each};
        }
    }
    work->num_tasks = num_tasks;
    return 0;
}

static void write_token(const trivet_attention_cache *cache, int64_t block_size, int64_t heads, int64_t item,
                        const rows_t *rows, int64_t token, int64_t slot) {
    char *out = cache->cache + slot / block_size * cache->block + slot % block_size * cache->token;
    const char *data = rows->data + token * rows->token * item;
    for (int64_t head = 0; head < heads; head++)
        memcpy(out + head * cache->head, data + head * rows->head * item, (size_t)(cache->dim * item));
}

/* Write keys and values to the cache, then attend; `out` is [num_tokens, num_heads, v_dim] without gaps.
 * Returns 0, or -1 when there is no memory. */
int64_t trivet_attention(const trivet_attention_step *step, const trivet_attention_layer *layer, const void *query,
                         int64_t query_token, int64_t query_head, const void *key, int64_t key_token, int64_t key_head,
                         const void *value, int64_t value_token, int64_t value_head, void *out, int64_t num_heads,
                         float scale, float softcap, int64_t window, const float *sinks, const float *slopes) {
    const rows_t keys = {key, key_token, key_head}, values = {value, value_token, value_head};
    const int64_t item = layer->dtype == TRIVET_BF16 ? 2 : 4, heads = layer->num_kv_heads;
    const call_t call = {.step = step,
                         .layer = layer,
                         .query = {query, query_token, query_head},
                         .how = {scale, softcap, window, sinks, slopes},
                         .out = out,
                         .num_heads = num_heads,
                         .per_head = num_heads / heads,
                         .pairs = HAS_PAIRS && layer->dtype == TRIVET_BF16};
    const int64_t used = step->query_start[step->num_rows], row_size = num_heads * layer->value.dim * item;
    memset(out, 0, (size_t)(step->query_start[0] * row_size));
    memset((char *)out + used * row_size, 0, (size_t)((step->num_tokens - used) * row_size));
    work_t work;
    if (make_work(&call, &work)) return -1;
    int64_t next = 0, failed = 0;
#pragma omp parallel num_threads(work.num_threads) if (work.num_threads > 1)
    {
        scratch_t scratch;
        const int ready = !make_scratch(&call, &scratch);
        if (!ready) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < step->num_tokens; token++) {
            write_token(&layer->key, layer->block_size, heads, item, &keys, token, step->slot_mapping[token]);
            write_token(&layer->value, layer->block_size, heads, item, &values, token, step->slot_mapping[token]);
        }
        for (int64_t i; ready && (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < work.num_tasks;) {
            const task_t *task = &work.tasks[i];
            run_task(&call, &work.plans[task->unit], task, &scratch, work.states);
        }
    }
    return failed ? -1 : 0;
}
