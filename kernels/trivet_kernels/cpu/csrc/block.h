/* What the parts of a decoder's layer have in common. */
#ifndef TRIVET_BLOCK_H
#define TRIVET_BLOCK_H

#include "common.h"

/* Activations of a gate; with one of them the first half of a product's outputs, rounded to the type of the results, is
 * activated and multiplied with the second half. */
enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, NO_GATE = 3 };

/* out [rows, outputs, half as many with a `gate`] = x [rows, inputs] times a layer's matrix plus its bias. Strides are
 * between rows, in elements; x and out are of `dtype`. Returns 0, or -1 if there is no memory to work in. */
typedef int64_t multiply_function(const void *layer, const void *x, int64_t x_stride, int64_t rows, void *out,
                                  int64_t out_stride, int64_t gate, int64_t dtype, int64_t num_threads);

/* Of elementwise_norm.c, elementwise_rotary.c. */
void trivet_rms_norm(const void *x, const float *weight, void *out, int64_t outer, int64_t inner, int64_t n,
                     int64_t x_outer, int64_t x_inner, int64_t out_outer, int64_t out_inner, float eps, int64_t dtype,
                     int64_t num_threads);
void trivet_add_rms_norm(const void *x, void *residual, const float *weight, void *out, int64_t rows, int64_t n,
                         int64_t x_stride, int64_t residual_stride, int64_t out_stride, float eps, int64_t dtype,
                         int64_t num_threads);
int64_t trivet_rotary(void *query, void *key, const int64_t *positions, const float *table, const float *query_weight,
                      const float *key_weight, int64_t tokens, int64_t query_heads, int64_t key_heads, int64_t dim,
                      int64_t width, int64_t query_token, int64_t query_head, int64_t key_token, int64_t key_head,
                      int64_t table_stride, int64_t num_positions, float eps, int64_t interleaved, int64_t dtype,
                      int64_t num_threads);

#endif
