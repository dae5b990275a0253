/* Gated activations: act(gate) * up of rows [gate, up]. */
#include "block.h"
#include "elementwise_vec.h"

/* Columns of a row that a thread takes at once, so that one long row is work for several. */
enum { CHUNK = 4096 };

INLINE vec_t activate(vec_t x, int kind) {
    return kind == SILU ? vec_silu(x) : kind == GELU_TANH ? vec_gelu_tanh(x) : vec_gelu_erf(x);
}

INLINE void gate_row(const void *x, void *out, int64_t begin, int64_t end, int64_t n, int kind, int dtype) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
        store(out, i, activate(load(x, i, dtype), kind) * load(x, n + i, dtype), dtype);
    if (i < end) {
        vec_t gate = load_part(x, i, end - i, dtype), up = load_part(x, n + i, end - i, dtype);
        store_part(out, i, end - i, activate(gate, kind) * up, dtype);
    }
}

typedef struct {
    const char *x;
    char *out;
    int64_t n, chunks, x_stride, out_stride, kind, dtype;
} gate_t;

static void gate_chunk(const void *arguments, int64_t part) {
    const gate_t *a = arguments;
    const int64_t row = part / a->chunks, begin = part % a->chunks * CHUNK, n = a->n;
    const int64_t end = begin + CHUNK < n ? begin + CHUNK : n;
    const char *x = a->x + row * a->x_stride * size_of(a->dtype);
    char *out = a->out + row * a->out_stride * size_of(a->dtype);
    /* Constants in the calls make a loop of its own for each case. */
    if (a->dtype == TRIVET_F32) {
        if (a->kind == SILU) gate_row(x, out, begin, end, n, SILU, TRIVET_F32);
        else if (a->kind == GELU_TANH) gate_row(x, out, begin, end, n, GELU_TANH, TRIVET_F32);
        else gate_row(x, out, begin, end, n, GELU_ERF, TRIVET_F32);
    } else {
        if (a->kind == SILU) gate_row(x, out, begin, end, n, SILU, TRIVET_BF16);
        else if (a->kind == GELU_TANH) gate_row(x, out, begin, end, n, GELU_TANH, TRIVET_BF16);
        else gate_row(x, out, begin, end, n, GELU_ERF, TRIVET_BF16);
    }
}

/* x [rows, 2n], out [rows, n]; `kind` as above. */
void trivet_gate_and_mul(const void *x, void *out, int64_t rows, int64_t n, int64_t x_stride, int64_t out_stride,
                         int64_t kind, int64_t dtype, int64_t num_threads) {
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    const gate_t a = {x, out, n, chunks, x_stride, out_stride, kind, dtype};
    for_each(gate_chunk, &a, rows * chunks, num_threads);
}
