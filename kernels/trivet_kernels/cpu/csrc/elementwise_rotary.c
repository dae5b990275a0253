/* Rotary position embedding of queries and keys in place, after a norm of each head where there is one. */
#include "block.h"
#include "elementwise_vec.h"

typedef struct {
    char *x;             /* [tokens, heads, dim] */
    const float *weight; /* of the norm [dim], NULL for none */
    int64_t heads, token_stride, head_stride;
} heads_t;

typedef struct {
    heads_t both[2]; /* queries and keys */
    const int64_t *positions;
    const float *table;
    int64_t table_stride, dim, width, interleaved, dtype;
    float eps;
} rotary_t;

/* The head as floats, normalised if there are weights. */
INLINE void widen_head(const void *x, const float *weight, float *head, int64_t dim, float eps, int dtype) {
    vec_t sum = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        vec_t value = i + LANES <= dim ? load(x, i, dtype) : load_part(x, i, dim - i, dtype);
        sum += value * value;
        store(head, i, value, TRIVET_F32); /* there is room for whole vectors */
    }
    if (!weight) return;
    const float scale = 1.0f / sqrtf(sum_of_lanes(sum) / (float)dim + eps);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        store(head, i, load(head, i, TRIVET_F32) * scale * load(weight, i, TRIVET_F32), TRIVET_F32);
    for (; i < dim; i++) head[i] = head[i] * scale * weight[i];
}

INLINE void narrow_head(const float *head, void *x, int64_t count, int dtype) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(x, i, load(head, i, TRIVET_F32), dtype);
    if (i < count) store_part(x, i, count - i, load_part(head, i, count - i, TRIVET_F32), dtype);
}

/* Elements i and half + i of a head, `from` and `to` of one type each (the same memory, perhaps). */
INLINE void rotate_halves(const void *from, int from_type, void *to, int to_type, const float *cosines, int64_t half) {
    const float *sines = cosines + half;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec_t a = load(from, i, from_type), b = load(from, half + i, from_type);
        vec_t c = load(cosines, i, TRIVET_F32), s = load(sines, i, TRIVET_F32);
        store(to, i, a * c - b * s, to_type);
        store(to, half + i, b * c + a * s, to_type);
    }
    if (i < half) {
        const int64_t rest = half - i;
        vec_t a = load_part(from, i, rest, from_type), b = load_part(from, half + i, rest, from_type);
        vec_t c = load_part(cosines, i, rest, TRIVET_F32), s = load_part(sines, i, rest, TRIVET_F32);
        store_part(to, i, rest, a * c - b * s, to_type);
        store_part(to, half + i, rest, b * c + a * s, to_type);
    }
}

INLINE void rotate_pairs(float *head, const float *cosines, int64_t half) {
    const float *sines = cosines + half;
    for (int64_t i = 0; i < half; i++) {
        float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cosines[i] - b * sines[i];
        head[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
}

/* Largest size of a head; the caller checks it. */
enum { MAX_DIM = 1024 };

INLINE void rotate_heads(const rotary_t *a, int64_t token, int interleaved, int dtype) {
    float head[MAX_DIM + LANES];
    const float *cosines = a->table + a->positions[token] * a->table_stride;
    for (int i = 0; i < 2; i++) {
        const heads_t *heads = &a->both[i];
        const int64_t count = heads->weight ? a->dim : a->width; /* of elements that change */
        for (int64_t h = 0; h < heads->heads; h++) {
            char *x = heads->x + (token * heads->token_stride + h * heads->head_stride) * size_of(dtype);
            if (!interleaved && !heads->weight) {
                rotate_halves(x, dtype, x, dtype, cosines, a->width / 2);
                continue;
            }
            widen_head(x, heads->weight, head, count, a->eps, dtype);
            if (interleaved)
                rotate_pairs(head, cosines, a->width / 2);
            else
                rotate_halves(head, TRIVET_F32, head, TRIVET_F32, cosines, a->width / 2);
            narrow_head(head, x, count, dtype);
        }
    }
}

static void rotate_token(const void *arguments, int64_t token) {
    const rotary_t *a = arguments;
    if (a->dtype == TRIVET_F32) {
        if (a->interleaved) rotate_heads(a, token, 1, TRIVET_F32);
        else rotate_heads(a, token, 0, TRIVET_F32);
    } else {
        if (a->interleaved) rotate_heads(a, token, 1, TRIVET_BF16);
        else rotate_heads(a, token, 0, TRIVET_BF16);
    }
}

/* Returns 0; or 1, with nothing done, if a position is not one of `num_positions`, the rows of the table. */
int64_t trivet_rotary(void *query, void *key, const int64_t *positions, const float *table, const float *query_weight,
                      const float *key_weight, int64_t tokens, int64_t query_heads, int64_t key_heads, int64_t dim,
                      int64_t width, int64_t query_token, int64_t query_head, int64_t key_token, int64_t key_head,
                      int64_t table_stride, int64_t num_positions, float eps, int64_t interleaved, int64_t dtype,
                      int64_t num_threads) {
    const rotary_t a = {{{query, query_weight, query_heads, query_token, query_head},
                         {key, key_weight, key_heads, key_token, key_head}},
                        positions, table, table_stride, dim, width, interleaved, dtype, eps};
    for (int64_t token = 0; token < tokens; token++)
        if (positions[token] < 0 || positions[token] >= num_positions) return 1;
    for_each(rotate_token, &a, tokens, num_threads);
    return 0;
}
