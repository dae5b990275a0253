/* Rows times a bfloat16 matrix in the layout that oneDNN packs weights into for processors with bfloat16 dot products:
 * panels of 64 outputs, each a sequence of input pairs, 64 outputs x 2 inputs (256 bytes) a pair. Padding outputs and
 * inputs are zeros.
 *
 * With few rows the product is as fast as memory: every thread reads its panels as one stream, and prefetches it far
 * enough ahead for more lines to be under way than the processor's own prefetcher has. With more rows a stretch of a
 * panel stays in the second-level cache while groups of rows pass over it, each with all its sums in registers.
 * Products are added up in the order of the inputs in one float32 per output, whatever the number of rows. */
#include "common.h"

#if defined(__AVX512BF16__)

#define PANEL 64     /* outputs */
#define GROUP 6      /* rows: 24 of 32 registers hold sums */
#define STRETCH 512  /* inputs, as in the library */
#define AHEAD 4096   /* bytes; found by measurement */

static inline __m512bh broadcast_pair(const bf16_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* Add the products of ROWS rows and `inputs` inputs, an even number, to `sums` [ROWS][PANEL]. */
#define DEFINE_GROUP(ROWS, FETCH, NAME)                                                                                \
    static void NAME(const bf16_t *w, const bf16_t *x, int64_t x_stride, int64_t inputs, float *sums) {               \
        __m512 acc[ROWS][4];                                                                                          \
        for (int r = 0; r < ROWS; r++)                                                                                \
            for (int c = 0; c < 4; c++) acc[r][c] = _mm512_setzero_ps();                                              \
        for (int64_t k = 0; k < inputs; k += 2, w += 2 * PANEL) {                                                     \
            if (FETCH)                                                                                                \
                for (int line = 0; line < 4; line++) _mm_prefetch((const char *)w + AHEAD + 64 * line, _MM_HINT_T1);  \
            __m512bh columns[4];                                                                                      \
            for (int c = 0; c < 4; c++) columns[c] = (__m512bh)_mm512_loadu_si512(w + 32 * c);                        \
            for (int r = 0; r < ROWS; r++) {                                                                          \
                __m512bh pair = broadcast_pair(x + r * x_stride + k);                                                 \
                for (int c = 0; c < 4; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], pair, columns[c]);                \
            }                                                                                                         \
        }                                                                                                             \
        for (int r = 0; r < ROWS; r++)                                                                                \
            for (int c = 0; c < 4; c++) {                                                                             \
                float *sum = sums + r * PANEL + 16 * c;                                                               \
                _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), acc[r][c]));                                \
            }                                                                                                         \
    }
#define DEFINE_GROUPS(ROWS) DEFINE_GROUP(ROWS, 1, fetch_##ROWS) DEFINE_GROUP(ROWS, 0, group_##ROWS)

DEFINE_GROUPS(1)
DEFINE_GROUPS(2)
DEFINE_GROUPS(3)
DEFINE_GROUPS(4)
DEFINE_GROUPS(5)
DEFINE_GROUPS(6)

typedef void (*group_fn)(const bf16_t *, const bf16_t *, int64_t, int64_t, float *);

/* by whether the weights are read for the first time, and rows - 1 */
static const group_fn GROUPS[2][GROUP] = {{group_1, group_2, group_3, group_4, group_5, group_6},
                                          {fetch_1, fetch_2, fetch_3, fetch_4, fetch_5, fetch_6}};

static void store_panel(const float *sums, const bf16_t *bias, bf16_t *out, int64_t out_stride, int64_t rows,
                        int64_t count) {
    for (int64_t c = 0; c < PANEL && c < count; c += 16) {
        __mmask16 mask = count - c >= 16 ? 0xffff : (__mmask16)((1u << (count - c)) - 1);
        __m512 shift = _mm512_setzero_ps();
        if (bias)
            shift = _mm512_castsi512_ps(
                _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias + c)), 16));
        for (int64_t r = 0; r < rows; r++) {
            __m512 value = _mm512_add_ps(_mm512_loadu_ps(sums + r * PANEL + c), shift);
            _mm256_mask_storeu_epi16(out + r * out_stride + c, mask, (__m256i)_mm512_cvtneps_pbh(value));
        }
    }
}

static void run_panel(const bf16_t *panel, const bf16_t *x, int64_t x_stride, int64_t rows, int64_t inputs,
                      float *sums) {
    memset(sums, 0, rows * PANEL * sizeof *sums);
    for (int64_t k = 0; k < inputs; k += STRETCH) {
        int64_t length = inputs - k < STRETCH ? inputs - k : STRETCH;
        for (int64_t r = 0; r < rows; r += GROUP) {
            int64_t group = rows - r < GROUP ? rows - r : GROUP;
            GROUPS[r == 0][group - 1](panel + k * PANEL, x + r * x_stride + k, x_stride, length, sums + r * PANEL);
        }
    }
}

int64_t trivet_has_packed_bf16(void) { return 1; }

/* out [rows, outputs] = x [rows, inputs] @ weight + bias, for at most 64 rows; `padded` inputs per panel, `inputs`
 * even, `bias` may be NULL. Strides between rows are in elements. */
void trivet_packed_bf16(const bf16_t *x, int64_t x_stride, const bf16_t *weight, const bf16_t *bias, bf16_t *out,
                        int64_t out_stride, int64_t rows, int64_t inputs, int64_t padded, int64_t outputs,
                        int64_t num_threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t p = 0; p < panels; p++) {
        float sums[64 * PANEL];
        run_panel(weight + p * PANEL * padded, x, x_stride, rows, inputs, sums);
        store_panel(sums, bias ? bias + p * PANEL : NULL, out + p * PANEL, out_stride, rows, outputs - p * PANEL);
    }
}

#else

int64_t trivet_has_packed_bf16(void) { return 0; }

#endif
