/* Storing the sums of a product. */
#include "matmul_store.h"

#include "elementwise_vec.h"

INLINE vec_t activated(vec_t x, int gate) {
    return gate == SILU ? vec_silu(x) : gate == GELU_TANH ? vec_gelu_tanh(x) : vec_gelu_erf(x);
}

/* Lanes from column `c` of a panel on: the sum of the planes plus the bias. */
INLINE vec_t sum_at(const float *sums, int64_t c, int planes, const float *bias) {
    vec_t sum = load(sums, c, TRIVET_F32);
    if (planes == 2) sum += load(sums, PANEL + c, TRIVET_F32);
    return bias ? sum + load(bias, c, TRIVET_F32) : sum;
}

/* What a store followed by a load makes of it. */
INLINE vec_t rounded(vec_t value, int dtype) {
    return dtype == TRIVET_BF16 ? widen_bf16(round_to_bf16(value)) : value;
}

INLINE void store_row(const float *sums, const float *up, const float *bias, const float *up_bias, int planes,
                      int64_t count, void *to, int kind, int dtype) {
    for (int64_t c = 0; c < count; c += LANES) {
        vec_t value = sum_at(sums, c, planes, bias);
        if (kind != NO_GATE)
            value = activated(rounded(value, dtype), kind) * rounded(sum_at(up, c, planes, up_bias), dtype);
        if (count - c >= LANES) store(to, c, value, dtype);
        else store_part(to, c, count - c, value, dtype);
    }
}

INLINE void store_rows(const QuantLinear *layer, const float *sums, const float *up, int64_t row, int64_t rows,
                       int64_t stripe, const Output *out, const int kind, const int dtype) {
    const int64_t column = stripe * PANEL, features = kind == NO_GATE ? layer->out_features : layer->out_features / 2;
    const int64_t count = features - column < PANEL ? features - column : PANEL;
    const float *bias = layer->bias ? layer->bias + column : NULL, *of_up = bias ? bias + features : NULL;
    float padded[PANEL];
    char *to = out->values + (row * out->stride + column) * size_of(dtype);
    if (count == PANEL && layer->planes == 1) {
        for (int64_t r = 0; r < rows; r++, sums += PANEL, up += PANEL, to += out->stride * size_of(dtype))
            store_row(sums, up, bias, of_up, 1, PANEL, to, kind, dtype);
        return;
    }
    if (bias && count < PANEL) bias = memcpy(padded, bias, (size_t)count * sizeof(float)); /* there is no gate */
    for (int64_t r = 0; r < rows; r++, to += out->stride * size_of(dtype)) {
        store_row(sums, up, bias, of_up, layer->planes, count, to, kind, dtype);
        sums += layer->planes * PANEL, up += layer->planes * PANEL;
    }
}

/* A loop of its own for each case. */
#define STORE(gate, dtype)                                                                                             \
    static void store_##gate##_##dtype(const QuantLinear *layer, const float *sums, const float *up, int64_t row,      \
                                       int64_t rows, int64_t stripe, const Output *out) {                              \
        store_rows(layer, sums, up, row, rows, stripe, out, gate, dtype);                                              \
    }
#define STORES(gate) STORE(gate, TRIVET_F32) STORE(gate, TRIVET_BF16)
STORES(NO_GATE)
STORES(SILU)
STORES(GELU_TANH)
STORES(GELU_ERF)

store_function storing(const Output *out) {
#define STORED(gate) [gate] = {[TRIVET_F32] = store_##gate##_TRIVET_F32, [TRIVET_BF16] = store_##gate##_TRIVET_BF16}
    static const store_function functions[][2] = {STORED(NO_GATE), STORED(SILU), STORED(GELU_TANH), STORED(GELU_ERF)};
    return functions[out->gate][out->dtype];
}
