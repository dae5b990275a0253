/* Paged attention for a mixed batch: what is computed by whom. See attention.h. */
#include "attention.h"

#include <pthread.h>

/* The work of a call, cut into tasks. */
typedef struct {
    plan_t *plans;
    task_t *tasks;
    float *states;
    int64_t num_tasks, num_threads;
} work_t;

/* Elements of keys and values, each times the lanes that it is multiplied with, that a thread takes about as long for
 * as another one takes to wake up. */
enum { MANY = 1 << 20 };

/* Tasks that there should be for each thread, so that all end at about the same time. */
enum { TASKS_PER_THREAD = 4 };

static pthread_key_t buffers_key;
static pthread_once_t buffers_once = PTHREAD_ONCE_INIT;

static void free_buffers(void *pointer) {
    buffers_t *buffers = pointer;
    free(buffers->plans.data);
    free(buffers->tasks.data);
    free(buffers->order.data);
    free(buffers->states.data);
    free(buffers->scratch.data);
    free(buffers);
}

static void make_key(void) { pthread_key_create(&buffers_key, free_buffers); }

buffers_t *trivet_attention_buffers(void) {
    pthread_once(&buffers_once, make_key);
    buffers_t *buffers = pthread_getspecific(buffers_key);
    if (buffers) return buffers;
    buffers = calloc(1, sizeof *buffers);
    if (buffers && pthread_setspecific(buffers_key, buffers)) {
        free(buffers);
        return NULL;
    }
    return buffers;
}

static int64_t num_queries(const call_t *call, int64_t row) {
    return (call->step->query_start[row + 1] - call->step->query_start[row]) * call->per_head;
}

static int64_t num_tiles(int64_t count, int64_t lanes) { return (count + lanes - 1) / lanes; }

/* One head's part of a unit of `count` queries from number `first` on; adds its products to `*elements`. */
static plan_t plan_tile(const call_t *call, int32_t row, int64_t first, int64_t count, int64_t *elements) {
    const int64_t start = first_position(call->step, row), dims = call->layer->key.dim + call->layer->value.dim;
    const int64_t low = first_seen(start + first / call->per_head, call->how.window);
    const int64_t high = start + (first + count - 1) / call->per_head + 1;
    *elements += (high - low) * dims * trivet_attention_lanes(count);
    return (plan_t){.row = row,
                    .num_heads = 1,
                    .count = (int32_t)count,
                    .first = first,
                    .first_part = (int32_t)(low / PART),
                    .num_parts = (int32_t)((high - 1) / PART) + 1 - (int32_t)(low / PART),
                    .state = -1,
                    .left = 1};
}

/* The units of a row: of up to `most_lanes` queries of a head, or of several heads, up to `most_heads`, where there is
 * place. */
static int64_t plan_row(const call_t *call, int32_t row, int64_t most_lanes, int64_t most_heads, plan_t *plans,
                        int64_t *elements) {
    const int64_t count = num_queries(call, row), heads = call->layer->num_kv_heads;
    const int64_t tiles = num_tiles(count, most_lanes);
    if (!count) return 0;
    const int64_t room = tiles > 1 ? 1 : trivet_attention_heads(count, most_lanes);
    const int64_t each = room < most_heads ? room : most_heads;
    int64_t num = 0;
    /* A head's units follow each other, while its keys are near. The last queries see most: they come first, so that
     * what is left for the end is small. */
    for (int64_t head = 0; head < heads; head += each)
        for (int64_t tile = tiles - 1; tile >= 0; tile--) {
            const int64_t first = tile * most_lanes, size = count - first < most_lanes ? count - first : most_lanes;
            plan_t *plan = &plans[num++];
            int64_t products = 0;
            *plan = plan_tile(call, row, first, size, &products);
            plan->head = (int32_t)head;
            plan->num_heads = (int32_t)(heads - head < each ? heads - head : each);
            *elements += products * plan->num_heads;
        }
    return num;
}

/* Rows in the order in which they are computed: about from the longest to the shortest, so that what is left for the
 * end is small. */
static void order_rows(const call_t *call, int32_t *order) {
    enum { PLACES = 64 };
    const trivet_attention_step *step = call->step;
    int64_t most = 1, next[PLACES + 1] = {0};
    for (int64_t row = 0; row < step->num_rows; row++) {
        const int64_t work = num_queries(call, row) * step->seq_lens[row];
        if (work > most) most = work;
    }
    for (int64_t row = 0; row < step->num_rows; row++)
        next[PLACES - num_queries(call, row) * step->seq_lens[row] * (PLACES - 1) / most]++;
    for (int i = 0; i < PLACES; i++) next[i + 1] += next[i];
    for (int64_t row = 0; row < step->num_rows; row++)
        order[next[PLACES - 1 - num_queries(call, row) * step->seq_lens[row] * (PLACES - 1) / most]++] = (int32_t)row;
}

/* The units of all rows. */
static int64_t plan_rows(const call_t *call, int64_t most_lanes, int64_t most_heads, const int32_t *order,
                         plan_t *plans, int64_t *elements) {
    int64_t num = 0;
    for (int64_t i = 0; i < call->step->num_rows; i++)
        num += plan_row(call, order[i], most_lanes, most_heads, plans + num, elements);
    return num;
}

static int64_t lanes_of(const plan_t *plan) { return (int64_t)trivet_attention_lanes(plan->count) * plan->num_heads; }

/* Have units of many partitions computed by several tasks, none of them more than a share of the work; returns how many
 * tasks are added and sets the size of the sums that they leave. */
static int64_t split(const call_t *call, plan_t *plans, int64_t num_units, int64_t num_threads, int64_t *states) {
    int64_t total = 0, added = 0;
    for (int64_t i = 0; i < num_units; i++) total += lanes_of(&plans[i]) * plans[i].num_parts;
    const int64_t share = total / (num_threads * TASKS_PER_THREAD) + 1;
    for (int64_t i = 0; i < num_units; i++) {
        plan_t *plan = &plans[i];
        const int64_t lanes = lanes_of(plan), each = share > lanes ? share / lanes : 1;
        if (plan->num_parts <= each) continue;
        plan->left = (int32_t)((plan->num_parts + each - 1) / each);
        plan->state = *states;
        *states += round_up(STATE_SIZE(lanes, call->layer->value.dim), 16) * plan->num_parts;
        added += plan->left - 1;
    }
    return added;
}

static int make_work(const call_t *call, work_t *work) {
    buffers_t *buffers = trivet_attention_buffers();
    if (!buffers) return -1;
    const trivet_attention_step *step = call->step;
    const int64_t heads = call->layer->num_kv_heads;
    int64_t most = 0, elements = 0;
    for (int64_t row = 0; row < step->num_rows; row++) most += num_tiles(num_queries(call, row), FEW_LANES) * heads;
    plan_t *plans = work->plans = grow(&buffers->plans, (size_t)most * sizeof(plan_t) + 64);
    int32_t *order = grow(&buffers->order, (size_t)step->num_rows * sizeof(int32_t) + 64);
    if (!plans || !order) return -1;
    order_rows(call, order);
    int64_t num_units = plan_rows(call, call->most_lanes, heads, order, plans, &elements);
    const int64_t useful = elements / MANY + 1;
    work->num_threads = step->num_threads < useful ? step->num_threads : useful;
    int64_t num_parts = 0, states = 0;
    for (int64_t i = 0; i < num_units; i++) num_parts += plans[i].num_parts;
    if (num_parts < work->num_threads * TASKS_PER_THREAD && work->num_threads > 1) {
        /* Too few: smaller ones, and one for each head. */
        num_units = plan_rows(call, FEW_LANES, 1, order, plans, &elements);
    }
    int64_t num_tasks = num_units;
    if (work->num_threads > 1) num_tasks += split(call, plans, num_units, work->num_threads, &states);
    task_t *tasks = work->tasks = grow(&buffers->tasks, (size_t)num_tasks * sizeof(task_t) + 64);
    work->states = grow(&buffers->states, (size_t)states * sizeof(float) + 64);
    if (!tasks || !work->states) return -1;
    for (int64_t i = 0; i < num_units; i++) {
        const plan_t *plan = &plans[i];
        for (int32_t n = 0, done = 0; n < plan->left; n++) {
            const int32_t each = (plan->num_parts - done) / (plan->left - n);
            *tasks++ = (task_t){(int32_t)i, plan->first_part + done, each};
            done += each;
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
int64_t trivet_attention(const trivet_attention_step *step, const trivet_attention_layer *layer,
                         const trivet_attention_inputs *inputs, const trivet_attention_scores *how, void *out) {
    const int64_t item = layer->dtype == TRIVET_BF16 ? 2 : 4, heads = layer->num_kv_heads;
    const int64_t num_tokens = step->num_tokens, num_heads = inputs->num_heads;
    const call_t call = {.step = step,
                         .layer = layer,
                         .query = inputs->query,
                         .how = *how,
                         .out = out,
                         .num_heads = num_heads,
                         .per_head = num_heads / heads,
                         .most_lanes = layer->dtype == TRIVET_BF16 ? MAX_LANES : FEW_LANES};
    const int64_t used = step->query_start[step->num_rows], row_size = num_heads * layer->value.dim * item;
    memset(out, 0, (size_t)(step->query_start[0] * row_size));
    memset((char *)out + used * row_size, 0, (size_t)((num_tokens - used) * row_size));
    work_t work;
    if (make_work(&call, &work)) return -1;
    int64_t next = 0, failed = 0;
#pragma omp parallel num_threads(work.num_threads) if (work.num_threads > 1)
    {
        void *scratch = trivet_attention_begin(&call);
        if (!scratch) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < num_tokens; token++) {
            const int64_t slot = step->slot_mapping[token];
            write_token(&layer->key, layer->block_size, heads, item, &inputs->key, token, slot);
            write_token(&layer->value, layer->block_size, heads, item, &inputs->value, token, slot);
        }
        /* The next task is taken before this one is computed, so that what is fetched is what will be read. */
        int64_t i = scratch ? __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED) : work.num_tasks;
        while (i < work.num_tasks) {
            const int64_t then = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            const task_t *next_task = then < work.num_tasks ? &work.tasks[then] : NULL;
            trivet_attention_task(&call, work.plans, &work.tasks[i], next_task, scratch, work.states);
            i = then;
        }
        if (scratch) trivet_attention_end(scratch);
    }
    return failed ? -1 : 0;
}
