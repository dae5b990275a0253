/* What the driver of paged attention and its tiles share.
 *
 * A tile is up to MAX_LANES queries (token, head) of one row and one key head. They lie beside each other in the lanes
 * of vectors, so everything about the softmax is vertical, and keys and values are read as they lie in the cache, one
 * element at a time for all lanes. Contexts are cut into partitions of PART keys and those into blocks of BLOCK keys,
 * both at fixed positions: each lane's sums are the same operations in the same order, whichever queries share its
 * tile, whoever computes a partition, and however a prompt was cut into chunks. (After Dao et al., "FlashAttention",
 * 2022, and Dao et al., "Flash-Decoding", 2023.) */
#ifndef TRIVET_ATTENTION_H
#define TRIVET_ATTENTION_H

#include "common.h"

enum { BLOCK = 64, PART = 512, MAX_LANES = 128, MAX_GROUPS = MAX_LANES / 8 + 3 };

/* What the layers of a step share. */
typedef struct {
    const int32_t *query_start;  /* [num_rows + 1] */
    const int32_t *seq_lens;     /* [num_rows] */
    const int32_t *block_table;  /* [num_rows, table_stride] */
    const int64_t *slot_mapping; /* [num_tokens] */
    int64_t table_stride, num_rows, num_tokens, num_threads;
} trivet_attention_step;

/* A layer's cache, [num_blocks, block_size, num_kv_heads, head_dim] with strides in bytes. */
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

/* Scores of a call: softcap 0 is none; window 0 is none, -n is chunks of n. */
typedef struct {
    float scale, softcap;
    int64_t window;
    const float *sinks, *slopes;
} scores_t;

/* Lanes of a tile that are computed together: one or two vectors. */
typedef struct {
    int64_t first, count; /* which of the tile's queries they are */
    int32_t lanes;        /* count rounded up to whole vectors */
    int32_t kind;         /* index into tile functions */
    int32_t low, high;    /* keys that any of them sees */
    int32_t all_low, all_high; /* keys that all of them see */
    int64_t offset;       /* of its first lane among the padded lanes of the tile */
} group_t;

/* Keys of one block that a tile reads: positions first + from … first + to - 1; entries are by place in the block. */
typedef struct {
    int32_t first, from, to;
    const void *key[BLOCK], *value[BLOCK]; /* value: of pairs of keys where products are of pairs */
} keys_t;

/* A tile's buffers; a group's part of one with n values a lane begins at n * group.offset. */
typedef struct {
    float *query;       /* [dim][lanes], or pairs of bfloat16 */
    int32_t *position;  /* [lanes] */
    int32_t *low;       /* [lanes]: the first position that is seen */
    float *slope;       /* [lanes], times log2(e) */
    float *scores;      /* [BLOCK][group's lanes] */
    float *weights;     /* the same, or pairs of bfloat16 */
} tile_t;

/* Sums of the keys seen so far, for n lanes: exp-weighted values [dim][n], maximum [n] and sum of weights [n]. */
#define STATE_SIZE(lanes, v_dim) ((lanes) * ((v_dim) + 2))

typedef void block_function(const group_t *, const tile_t *, const keys_t *, const scores_t *, int64_t dim,
                            int64_t v_dim, float *state);
typedef void merge_function(int64_t v_dim, float *state, const float *part);

#endif
