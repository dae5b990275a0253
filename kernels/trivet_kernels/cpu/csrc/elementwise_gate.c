/* Gated activations: act(gate) * up of rows [gate, up]. */
#include "elementwise_vec.h"

enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };

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

INLINE void gate_rows(const void *x, void *out, int64_t rows, int64_t n, int64_t x_stride, int64_t out_stride,
                      int64_t num_threads, int kind, int dtype) {
    const int64_t chunks = (n + CHUNK - 1) / CHUNK, size = dtype == TRIVET_F32 ? 4 : 2;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
    for (int64_t part = 0; part < rows * chunks; part++) {
        int64_t row = part / chunks, begin = part % chunks * CHUNK;
        int64_t end = begin + CHUNK < n ? begin + CHUNK : n;
        gate_row((const char *)x + row * x_stride * size, (char *)out + row * out_stride * size, begin, end, n, kind,
                 dtype);
    }
}

/* x [rows, 2n], out [rows, n]; `kind` as above. */
void trivet_gate_and_mul(const void *x, void *out, int64_t rows, int64_t n, int64_t x_stride, int64_t out_stride,
                         int64_t kind, int64_t dtype, int64_t num_threads) {
    if (dtype == TRIVET_F32) {
        if (kind == SILU) gate_rows(x, out, rows, n, x_stride, out_stride, num_threads, SILU, TRIVET_F32);
        else if (kind == GELU_TANH) gate_rows(x, out, rows, n, x_stride, out_stride, num_threads, GELU_TANH, TRIVET_F32);
        else gate_rows(x, out, rows, n, x_stride, out_stride, num_threads, GELU_ERF, TRIVET_F32);
    } else {
        if (kind == SILU) gate_rows(x, out, rows, n, x_stride, out_stride, num_threads, SILU, TRIVET_BF16);
        else if (kind == GELU_TANH) gate_rows(x, out, rows, n, x_stride, out_stride, num_threads, GELU_TANH, TRIVET_BF16);
        else gate_rows(x, out, rows, n, x_stride, out_stride, num_threads, GELU_ERF, TRIVET_BF16);
    }
}
