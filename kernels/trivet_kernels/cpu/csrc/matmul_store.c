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
                       int64_t stripe, const Output *out, int kind, int dtype) {
    const int64_t column = stripe * PANEL, features = kind == NO_GATE ? layer->out_features : layer->out_features / 2;
    const int64_t count = features - column < PANEL ? features - column : PANEL;
    float bias[2][PANEL];
    if (layer->bias) {
        memcpy(bias[0], layer->bias + column, (size_t)count * sizeof(float));
        if (kind != NO_GATE) memcpy(bias[1], layer->bias + features + column, sizeof bias[1]);
    }
    const float *of_gate = layer->bias ? bias[0] : NULL, *of_up = layer->bias ? bias[1] : NULL;
    for (int64_t r = 0; r < rows; r++, sums += layer->planes * PANEL, up += layer->planes * PANEL) {
        char *to = out->values + ((row + r) * out->stride + column) * size_of(dtype);
        store_row(sums, up, of_gate, of_up, layer->planes, count, to, kind, dtype);
    }
}

void store_sums(const QuantLinear *layer, const float *sums, const float *up, int64_t row, int64_t rows, int64_t stripe,
                const Output *out) {
    /* Constants in the calls make a loop of its own for each case. */
#define STORE(of_gate, type)                                                                                           \
    if (out->gate == of_gate && out->dtype == type) store_rows(layer, sums, up, row, rows, stripe, out, of_gate, type)
    STORE(NO_GATE, TRIVET_F32);
    STORE(NO_GATE, TRIVET_BF16);
    STORE(SILU, TRIVET_F32);
    STORE(SILU, TRIVET_BF16);
    STORE(GELU_TANH, TRIVET_F32);
    STORE(GELU_TANH, TRIVET_BF16);
    STORE(GELU_ERF, TRIVET_F32);
    STORE(GELU_ERF, TRIVET_BF16);
#undef STORE
}
