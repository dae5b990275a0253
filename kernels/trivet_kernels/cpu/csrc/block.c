/* The two pieces of a decoder's layer around its attention, each in one call: with a row or two, a call from Python
 * takes as long as a small product, since streaming weights has driven the interpreter's data from the caches. They call
 * what Python would call, in the same order with the same arguments. */
#include "block.h"

enum { MOST_PARTS = 3 };

/* Elements from which on norms and rotations are shared among threads. */
enum { MANY = 1 << 14 };

typedef struct {
    multiply_function *multiply;
    const void *layer;
    int64_t outputs; /* of the product, before a gate */
} product_t;

/* NativeBlock of block.py. Norms are float32 [hidden] ([head_dim] of queries and keys), NULL where there is none. */
typedef struct {
    product_t qkv[MOST_PARTS], out, gate_up, down;
    const float *attention_norm, *mlp_norm, *attention_output_norm, *mlp_output_norm, *query_norm, *key_norm;
    const float *table; /* of rotary embeddings, [num_positions, table_stride], `width` columns of which count */
    int64_t table_stride, num_positions, width;
    int64_t num_qkv, heads, kv_heads, head_dim, hidden, intermediate, gate, dtype;
    int64_t slice; /* rows that are computed at once */
    float eps;
} block_t;

static char *row_of(const block_t *block, const void *rows, int64_t row, int64_t stride) {
    return (char *)rows + row * stride * (block->dtype == TRIVET_F32 ? 4 : 2);
}

static int64_t threads_for(int64_t elements, int64_t num_threads) { return elements < MANY ? 1 : num_threads; }

static int64_t multiply(const block_t *block, const product_t *product, const void *x, int64_t x_stride, int64_t rows,
                        void *out, int64_t out_stride, int64_t gate, int64_t num_threads) {
    return product->multiply(product->layer, x, x_stride, rows, out, out_stride, gate, block->dtype, num_threads);
}

/* out = norm(residual += delta), or norm(residual) without a delta; all [rows, hidden]. */
static void norm(const block_t *block, const void *delta, void *residual, const float *weight, void *out, int64_t rows,
                 int64_t num_threads) {
    const int64_t n = block->hidden, threads = threads_for(rows * n, num_threads);
    if (delta) trivet_add_rms_norm(delta, residual, weight, out, rows, n, n, n, n, block->eps, block->dtype, threads);
    else trivet_rms_norm(residual, weight, out, rows, 1, n, n, 0, n, 0, block->eps, block->dtype, threads);
}

static void norm_in_place(const block_t *block, const float *weight, void *x, int64_t rows, int64_t num_threads) {
    if (weight) norm(block, NULL, x, weight, x, rows, num_threads);
}

/* Queries, keys and values of `rows` tokens, side by side in `qkv`. `delta` (or NULL) is added to `residual`; `normed` is
 * memory for a slice [hidden]. All are dense. Returns 0, -1 if there is no memory to work in, 1 if a position is not one
 * of the table's. */
int64_t trivet_block_before(const block_t *block, void *residual, const void *delta, const int64_t *positions,
                            int64_t rows, void *normed, void *qkv, int64_t num_threads) {
    const int64_t hidden = block->hidden, dim = block->head_dim;
    const int64_t query_size = block->heads * dim, width = query_size + 2 * block->kv_heads * dim;
    for (int64_t row = 0; row < rows; row += block->slice) {
        const int64_t count = rows - row < block->slice ? rows - row : block->slice;
        char *residuals = row_of(block, residual, row, hidden), *to = row_of(block, qkv, row, width);
        norm(block, delta ? row_of(block, delta, row, hidden) : NULL, residuals, block->attention_norm, normed, count,
             num_threads);
        for (int64_t i = 0; i < block->num_qkv; to = row_of(block, to, 1, block->qkv[i++].outputs))
            if (multiply(block, &block->qkv[i], normed, hidden, count, to, width, NO_GATE, num_threads)) return -1;
    }
    return trivet_rotary(qkv, row_of(block, qkv, 1, query_size), positions, block->table, block->query_norm,
                         block->key_norm, rows, block->heads, block->kv_heads, dim, block->width, width, dim, width, dim,
                         block->table_stride, block->num_positions, block->eps, 0, block->dtype,
                         threads_for(rows * (width - block->kv_heads * dim), num_threads));
}

/* What the feed-forward network puts out, into `delta`; `attended` [rows, heads * head_dim] goes through the output
 * projection and is added to `residual` first. `normed`, `projected` [hidden] and `gated` [intermediate] are memory for a
 * slice. All are dense. Returns 0, or -1 if there is no memory to work in. */
int64_t trivet_block_after(const block_t *block, void *residual, const void *attended, int64_t rows, void *normed,
                           void *projected, void *gated, void *delta, int64_t num_threads) {
    const int64_t hidden = block->hidden, size = block->heads * block->head_dim, wide = block->intermediate;
    for (int64_t row = 0; row < rows; row += block->slice) {
        const int64_t count = rows - row < block->slice ? rows - row : block->slice;
        char *to = row_of(block, delta, row, hidden);
        if (multiply(block, &block->out, row_of(block, attended, row, size), size, count, projected, hidden, NO_GATE,
                     num_threads))
            return -1;
        norm_in_place(block, block->attention_output_norm, projected, count, num_threads);
        norm(block, projected, row_of(block, residual, row, hidden), block->mlp_norm, normed, count, num_threads);
        if (multiply(block, &block->gate_up, normed, hidden, count, gated, wide, block->gate, num_threads) ||
            multiply(block, &block->down, gated, wide, count, to, hidden, NO_GATE, num_threads))
            return -1;
        norm_in_place(block, block->mlp_output_norm, to, count, num_threads);
    }
    return 0;
}
