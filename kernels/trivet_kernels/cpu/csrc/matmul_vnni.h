/* Tiles with AVX-512 VNNI: four multiply-adds of bytes per lane and instruction. */
#ifndef TRIVET_MATMUL_VNNI_H
#define TRIVET_MATMUL_VNNI_H

#include "matmul.h"

#define UNROLL _Pragma("GCC unroll 12")

/* Not the intrinsic: with that, GCC 12 moves every sum to another register and back around each loop. */
static inline void add_products(__m512i *sum, __m512i weight, __m512i four) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(weight), "v"(four));
}

static inline __m512i four_of(const int8_t *values) {
    int32_t four;
    memcpy(&four, values, sizeof four);
    return _mm512_set1_epi32(four);
}

__attribute__((always_inline)) static inline void tile_vnni(const int rows, const int bits, const QuantLinear *layer,
                                                            const Activations *a, int64_t first, int64_t panel,
                                                            Ahead ahead, float *out) {
    const int64_t segment = layer->segment, segments = layer->num_segments, stride = a->stride;
    const int64_t half_bytes = HALF * segment * segments * bits / 8;
    const uint8_t *weight = layer->weight + panel * 2 * half_bytes, *others = weight + half_bytes;
    const int8_t *values = a->values + first * stride;
    const int32_t *start = a->start + first * a->segments;
    const float *act_scale = a->scale + first * a->segments, *act_sum = a->sum + first * a->segments;
    const __m512i low = _mm512_set1_epi8(15);
    int64_t index = panel * segments * PANEL;
    __m512 totals[TILE][2];
    UNROLL for (int r = 0; r < rows; r++) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
    for (int64_t s = 0; s < segments; s++, index += PANEL) {
        for (int64_t line = 0; line < ahead.lines; line++, ahead.from += 64) _mm_prefetch(ahead.from, _MM_HINT_T1);
        __m512i sums[TILE][2];
        UNROLL for (int r = 0; r < rows; r++) {
            sums[r][0] = sums[r][1] = _mm512_set1_epi32(start[r * a->segments + s]);
        }
        for (int64_t k = 0; k < segment; k += 32 / bits, weight += 64, others += 64, values += 32 / bits) {
            __m512i left = _mm512_loadu_si512(weight), right = _mm512_loadu_si512(others);
            __m512i left_high = left, right_high = right;
            if (bits == 8 && STORED_SIGN) {
                left = _mm512_xor_si512(left, _mm512_set1_epi8((char)STORED_SIGN));
                right = _mm512_xor_si512(right, _mm512_set1_epi8((char)STORED_SIGN));
            }
            if (bits == 4) {
                left_high = _mm512_and_si512(_mm512_srli_epi16(left, 4), low);
                right_high = _mm512_and_si512(_mm512_srli_epi16(right, 4), low);
                left = _mm512_and_si512(left, low);
                right = _mm512_and_si512(right, low);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                __m512i four = four_of(values + r * stride);
                add_products(&sums[r][0], left, four);
                add_products(&sums[r][1], right, four);
            }
            if (bits == 4) {
                UNROLL for (int r = 0; r < rows; r++) {
                    __m512i four = four_of(values + r * stride + 4);
                    add_products(&sums[r][0], left_high, four);
                    add_products(&sums[r][1], right_high, four);
                }
            }
        }
        if (layer->row_scale) {
            UNROLL for (int r = 0; r < rows; r++) {
                __m512 of_row = _mm512_set1_ps(act_scale[r * a->segments + s]);
                for (int half = 0; half < 2; half++)
                    totals[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][half]), of_row, totals[r][half]);
            }
            continue;
        }
        __m512 scale[2] = {load_scale(layer, index), load_scale(layer, index + 16)}, offset[2];
        if (layer->offset)
            for (int half = 0; half < 2; half++) offset[half] = load_half(layer->offset + index + half * 16);
        UNROLL for (int r = 0; r < rows; r++) {
            __m512 of_row = _mm512_set1_ps(act_scale[r * a->segments + s]);
            __m512 sum_of_row = _mm512_set1_ps(act_sum[r * a->segments + s]);
            for (int half = 0; half < 2; half++) {
                __m512 total = totals[r][half];
                __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][half]), of_row);
                total = _mm512_fmadd_ps(scaled, scale[half], total);
                if (layer->offset) total = _mm512_fmadd_ps(sum_of_row, offset[half], total);
                totals[r][half] = total;
            }
        }
    }
    for (int half = 0; half < 2; half++) {
        __m512 scale = layer->row_scale ? load_scale(layer, panel * PANEL + half * 16) : _mm512_set1_ps(1);
        UNROLL for (int r = 0; r < rows; r++)
            _mm512_store_ps(out + r * PANEL + half * 16, _mm512_mul_ps(totals[r][half], scale));
    }
}

/* Tiles of every height, each compiled on its own so that its sums are in registers. */
#define HEIGHT(rows)                                                                                                   \
    static void tile_vnni_##rows(const QuantLinear *layer, const Activations *a, int64_t first, int64_t panel,         \
                                 Ahead ahead, float *out) {                                                            \
        if (layer->bits == 4)                                                                                          \
            tile_vnni(rows, 4, layer, a, first, panel, ahead, out);                                                    \
        else                                                                                                           \
            tile_vnni(rows, 8, layer, a, first, panel, ahead, out);                                                    \
    }
HEIGHT(1)
HEIGHT(2)
HEIGHT(3)
HEIGHT(4)
HEIGHT(5)
HEIGHT(6)

static void (*const tiles_vnni[TILE])(const QuantLinear *, const Activations *, int64_t, int64_t, Ahead, float *) = {
    tile_vnni_1, tile_vnni_2, tile_vnni_3, tile_vnni_4, tile_vnni_5, tile_vnni_6,
};

#endif
