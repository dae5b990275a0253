/* What the parts of paged attention share.
 *
 * A unit is queries (token, head) of one row and of one or more key heads, up to MAX_LANES. Those of a key head lie
 * beside each other in the lanes of vectors, so everything about the softmax is vertical, and keys and values are taken
 * one element at a time for all lanes, or by matrix tiles. Contexts are cut into partitions of PART keys and those into
 * blocks of BLOCK keys, both at fixed positions: each lane's sums are the same operations in the same order, whichever
 * queries share its unit, whoever computes a partition, and however a prompt was cut into chunks. (After Dao et al.,
 * "FlashAttention", 2022, and Dao et al., "Flash-Decoding", 2023.) */
#ifndef TRIVET_ATTENTION_H
#define TRIVET_ATTENTION_H

#include "common.h"
#include "tiles.h"

/* FEW_LANES is where products take so much longer than what is done once for a unit's block that more lanes gain
 * nothing, except with matrix tiles. */
enum { BLOCK = 64, PART = 512, FEW_LANES = 128, MAX_LANES = HAS_TILES ? 512 : FEW_LANES, MAX_GROUPS = MAX_LANES / 4 };

#define HIDDEN_SYMBOL __attribute__((visibility("hidden")))

/* What the layers of a step share. */
typedef struct {
    const int32_t *query_start;  /* [num_rows + 1] */
    const int32_t *seq_lens;     /* [num_rows] */
    const int32_t *block_table;  /* [num_rows, table_stride] */
    const int64_t *slot_mapping; /* [num_tokens] */
    int64_t table_stride, num_rows, num_tokens, num_threads;
} trivet_attention_step;

/* A layer's keys or values, [num_blocks, block_size, num_kv_heads, dim] with strides in bytes. */
typedef struct {
    char *cache;
    int64_t block, token, head, dim;
} trivet_attention_cache;

typedef struct {
    trivet_attention_cache key, value;
    int64_t block_size, num_kv_heads, dtype;
} trivet_attention_layer;

/* [num_tokens, num_heads, dim] with strides in elements. */
typedef struct {
    const char *data;
    int64_t token, head;
} rows_t;

/* Of a layer, in its dtype; `num_heads` of the queries. */
typedef struct {
    rows_t query, key, value;
    int64_t num_heads;
} trivet_attention_inputs;

/* How scores are made. */
typedef struct {
    float scale, softcap;        /* softcap 0: none */
    int64_t window;              /* 0: none; -n: chunks of n */
    const float *sinks, *slopes; /* [num_heads] or NULL */
} trivet_attention_scores;

typedef struct {
    const trivet_attention_step *step;
    const trivet_attention_layer *layer;
    rows_t query;
    trivet_attention_scores how;
    char *out;
    int64_t num_heads, per_head; /* query heads, and those of them that share a key head */
    int64_t most_lanes;          /* of a unit */
} call_t;

/* A unit and how it is computed: by one task, or in partitions by several. The queries of a row that share a key head
 * are numbered token by token. */
typedef struct {
    int32_t row, head, num_heads; /* key heads */
    int32_t count;                /* queries of each of them … */
    int64_t first;                /* … and the number of the first one */
    int32_t first_part, num_parts;
    int64_t state; /* where in the shared buffer its partitions' sums are; -1: one task computes all */
    int32_t left;  /* tasks that are not done */
} plan_t;

typedef struct {
    int32_t unit, part, num_parts;
} task_t;

/* Sums over keys, for n lanes: weighted values [padded_sums(v_dim)][n], what scores are relative to [n] and the sum of
 * weights [n]. */
#define STATE_SIZE(lanes, v_dim) ((lanes) * (padded_sums(v_dim) + 2))

static inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* Sums of whole matrix tiles. */
static inline int64_t padded_sums(int64_t v_dim) { return round_up(v_dim, 16); }

/* A buffer that only grows. */
typedef struct {
    void *data;
    size_t size;
} buffer_t;

static inline void *grow(buffer_t *buffer, size_t size) {
    if (buffer->size < size) {
        free(buffer->data);
        size = (size + size / 2 + 63) / 64 * 64;
        buffer->data = aligned_alloc(64, size);
        buffer->size = buffer->data ? size : 0;
    }
    return buffer->data;
}

/* What a thread keeps from call to call; it is freed when the thread ends. */
typedef struct {
    buffer_t plans, tasks, order, states, scratch;
} buffers_t;

/* Those of the calling thread, NULL if there is no memory. */
HIDDEN_SYMBOL buffers_t *trivet_attention_buffers(void);

/* The first position that a query at `position` sees. */
static inline int64_t first_seen(int64_t position, int64_t window) {
    if (window == 0) return 0;
    if (window < 0) return position / -window * -window;
    return position < window ? 0 : position - window + 1;
}

/* Position in the row's context of its first query. */
static inline int64_t first_position(const trivet_attention_step *step, int32_t row) {
    return step->seq_lens[row] - (step->query_start[row + 1] - step->query_start[row]);
}

/* Lanes that `count` queries of a key head take, and how many key heads with so many there may be in a unit of up to
 * `most_lanes`. */
HIDDEN_SYMBOL int32_t trivet_attention_lanes(int64_t count);
HIDDEN_SYMBOL int64_t trivet_attention_heads(int64_t count, int64_t most_lanes);

/* Before and after a thread's tasks of a call: its memory for them, to be given to trivet_attention_task; NULL if there
 * is none. */
HIDDEN_SYMBOL void *trivet_attention_begin(const call_t *call);
HIDDEN_SYMBOL void trivet_attention_end(void *scratch);

/* Compute a task; the last one of a unit stores its results. `next`, if not NULL, is likely to follow: its first keys
 * are fetched from memory in the meantime. */
HIDDEN_SYMBOL void trivet_attention_task(const call_t *call, plan_t *plans, const task_t *task, const task_t *next,
                                         void *scratch, float *states);

#endif
