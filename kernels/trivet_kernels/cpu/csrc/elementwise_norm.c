/* RMSNorm, alone and with the sum that comes before it. */
#include "block.h"
#include "elementwise_vec.h"

/* 1 / sqrt(mean(x²) + eps) of n elements. Four accumulators hide the latency of the additions. */
INLINE float inverse_rms(const void *x, int64_t n, float eps, int dtype) {
    vec_t sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            vec_t value = load(x, i + j * LANES, dtype);
            sums[j] += value * value;
        }
    for (; i < n; i += LANES) {
        vec_t value = i + LANES <= n ? load(x, i, dtype) : load_part(x, i, n - i, dtype);
        sums[0] += value * value;
    }
    return 1.0f / sqrtf(sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)n + eps);
}

INLINE void norm_row(const void *x, const float *weight, void *out, int64_t n, float eps, int dtype) {
    const float scale = inverse_rms(x, n, eps, dtype);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store(out, i, load(x, i, dtype) * scale * load(weight, i, TRIVET_F32), dtype);
    if (i < n) {
        vec_t value = load_part(x, i, n - i, dtype) * scale * load_part(weight, i, n - i, TRIVET_F32);
        store_part(out, i, n - i, value, dtype);
    }
}

INLINE void add_row(const void *x, void *residual, int64_t n, int dtype) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(residual, i, load(residual, i, dtype) + load(x, i, dtype), dtype);
    if (i < n) {
        vec_t value = load_part(residual, i, n - i, dtype) + load_part(x, i, n - i, dtype);
        store_part(residual, i, n - i, value, dtype);
    }
}

typedef struct {
    const char *x;
    char *residual; /* NULL where there is none */
    const float *weight;
    char *out;
    int64_t inner, n, x_outer, x_inner, residual_outer, out_outer, out_inner, dtype;
    float eps;
} norm_t;

INLINE void norm_any(const norm_t *a, int64_t row, int dtype) {
    const int64_t outer = row / a->inner, inner = row % a->inner, size = size_of(dtype);
    const char *x = a->x + (outer * a->x_outer + inner * a->x_inner) * size;
    char *out = a->out + (outer * a->out_outer + inner * a->out_inner) * size;
    if (a->residual) {
        char *residual = a->residual + outer * a->residual_outer * size;
        add_row(x, residual, a->n, dtype);
        x = residual;
    }
    norm_row(x, a->weight, out, a->n, a->eps, dtype);
}

static void norm_one(const void *arguments, int64_t row) {
    const norm_t *a = arguments;
    if (a->dtype == TRIVET_F32)
        norm_any(a, row, TRIVET_F32);
    else
        norm_any(a, row, TRIVET_BF16);
}

/* x [outer, inner, n] and out likewise, both with strides between rows; weight [n]. */
void trivet_rms_norm(const void *x, const float *weight, void *out, int64_t outer, int64_t inner, int64_t n,
                     int64_t x_outer, int64_t x_inner, int64_t out_outer, int64_t out_inner, float eps, int64_t dtype,
                     int64_t num_threads) {
    const norm_t a = {x, NULL, weight, out, inner, n, x_outer, x_inner, 0, out_outer, out_inner, dtype, eps};
    for_each(norm_one, &a, outer * inner, num_threads);
}

/* residual += x, rounded to their type, then the norm of that; all [rows, n]. */
void trivet_add_rms_norm(const void *x, void *residual, const float *weight, void *out, int64_t rows, int64_t n,
                         int64_t x_stride, int64_t residual_stride, int64_t out_stride, float eps, int64_t dtype,
                         int64_t num_threads) {
    const norm_t a = {x, residual, weight, out, 1, n, x_stride, 0, residual_stride, out_stride, 0, dtype, eps};
    for_each(norm_one, &a, rows, num_threads);
}
