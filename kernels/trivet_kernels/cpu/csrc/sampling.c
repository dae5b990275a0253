/* What is looked for in rows of logits. */
#include "elementwise_vec.h"

/* Elements of which first only the largest is looked for. */
enum { BLOCK = 1024 };

typedef struct {
    const char *x;
    char *values;
    int64_t *ids;
    int64_t n, stride, dtype;
} argmax_t;

/* The largest of x[begin … end), and whether one of them is NaN (the result is undefined then). */
INLINE float block_max(const void *x, int64_t begin, int64_t end, int *has_nan, int dtype) {
    vec_t best[2] = {splat(-INFINITY), splat(-INFINITY)};
    ivec_t nan = {};
    int64_t i = begin;
    for (; i + 2 * LANES <= end; i += 2 * LANES)
        for (int j = 0; j < 2; j++) {
            vec_t value = load(x, i + j * LANES, dtype);
            nan |= value != value;
            best[j] = choose(value > best[j], value, best[j]);
        }
    best[0] = choose(best[1] > best[0], best[1], best[0]);
    float largest = -INFINITY;
    *has_nan = 0;
    for (int lane = 0; lane < LANES; lane++) {
        largest = best[0][lane] > largest ? best[0][lane] : largest;
        *has_nan |= nan[lane];
    }
    for (; i < end; i++) {
        float value = load_one(x, i, dtype);
        *has_nan |= value != value;
        largest = value > largest ? value : largest;
    }
    return largest;
}

INLINE void argmax_row(const argmax_t *a, int64_t row, int dtype) {
    const char *x = a->x + row * a->stride * size_of(dtype);
    float largest = -INFINITY;
    int64_t begin = 0, id = 0;
    int has_nan = 0;
    for (int64_t at = 0; at < a->n && !has_nan; at += BLOCK) {
        float value = block_max(x, at, at + BLOCK < a->n ? at + BLOCK : a->n, &has_nan, dtype);
        if (has_nan || value > largest) {
            largest = value;
            begin = at;
        }
    }
    for (id = begin; id < a->n; id++) {
        float value = load_one(x, id, dtype);
        if (has_nan ? value != value : value == largest) break;
    }
    a->ids[row] = id;
    memcpy(a->values + row * size_of(dtype), x + id * size_of(dtype), (size_t)size_of(dtype));
}

static void argmax_one(const void *arguments, int64_t row) {
    const argmax_t *a = arguments;
    if (a->dtype == TRIVET_F32)
        argmax_row(a, row, TRIVET_F32);
    else
        argmax_row(a, row, TRIVET_BF16);
}

/* The largest of the n > 0 first elements of each row: its place, the first of equals, and its value. NaN is largest. */
void trivet_argmax(const void *x, int64_t *ids, void *values, int64_t rows, int64_t n, int64_t stride, int64_t dtype,
                   int64_t num_threads) {
    const argmax_t a = {x, values, ids, n, stride, dtype};
    for_each(argmax_one, &a, rows, num_threads);
}

typedef struct {
    const char *x;
    int32_t *ids;
    int64_t n, stride, dtype;
} likeliest_t;

INLINE void likeliest_row(const likeliest_t *a, int64_t row, int dtype) {
    const char *x = a->x + row * a->stride * size_of(dtype);
    int64_t id = 0;
    char value[sizeof(float)];
    const argmax_t one = {x, value, &id, a->n, 0, dtype};
    argmax_row(&one, 0, dtype);
    a->ids[row] = isfinite(load_one(x, id, dtype)) ? (int32_t)id : -1;
}

static void likeliest_one(const void *arguments, int64_t row) {
    const likeliest_t *a = arguments;
    if (a->dtype == TRIVET_F32)
        likeliest_row(a, row, TRIVET_F32);
    else
        likeliest_row(a, row, TRIVET_BF16);
}

/* As trivet_argmax, the places alone. Returns how many rows have a largest element that is not finite; their place is
 * -1. */
int64_t trivet_likeliest(const void *x, int32_t *ids, int64_t rows, int64_t n, int64_t stride, int64_t dtype,
                         int64_t num_threads) {
    const likeliest_t a = {x, ids, n, stride, dtype};
    for_each(likeliest_one, &a, rows, num_threads);
    int64_t lost = 0;
    for (int64_t row = 0; row < rows; row++) lost += ids[row] < 0;
    return lost;
}

typedef struct {
    const char *x;
    float *out;
    const int64_t *rows;
    const uint32_t *bits;
    int64_t width, stride, out_stride, words, dtype;
} copy_t;

INLINE void copy_row(const copy_t *c, int64_t i, int dtype) {
    const char *x = c->x + c->rows[i] * c->stride * size_of(dtype);
    const uint32_t *bits = c->bits ? c->bits + i * c->words : NULL;
    float *out = c->out + i * c->out_stride;
    ivec_t lane;
    for (int j = 0; j < LANES; j++) lane[j] = j;
    int64_t at = 0;
    for (; at + LANES <= c->width; at += LANES) {
        vec_t value = load(x, at, dtype);
        if (bits) {
            uint32_t word = bits[at / 32] >> (at % 32);
            ivec_t kept = -(((ivec_t){} + (int32_t)word) >> lane & 1);
            value = choose(kept, value, splat(-INFINITY));
        }
        store(out, at, value, TRIVET_F32);
    }
    for (; at < c->width; at++)
        out[at] = !bits || bits[at / 32] >> (at % 32) & 1u ? load_one(x, at, dtype) : -INFINITY;
}

static void copy_one(const void *arguments, int64_t i) {
    const copy_t *c = arguments;
    if (c->dtype == TRIVET_F32)
        copy_row(c, i, TRIVET_F32);
    else
        copy_row(c, i, TRIVET_BF16);
}

/* Float32 copies of some rows, -inf where a row has bits and a token's is not set. `bits` may be NULL. */
void trivet_float_rows(const void *x, float *out, const int64_t *rows, const uint32_t *bits, int64_t count,
                       int64_t width, int64_t stride, int64_t out_stride, int64_t words, int64_t dtype,
                       int64_t num_threads) {
    const copy_t c = {x, out, rows, bits, width, stride, out_stride, words, dtype};
    for_each(copy_one, &c, count, num_threads);
}
