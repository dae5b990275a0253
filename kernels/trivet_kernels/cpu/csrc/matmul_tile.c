/* A tile of a product, in the instructions of this level. */
#include "matmul.h"

#if defined(__AVX512VNNI__)
#include "matmul_vnni.h"

void multiply_tile(const QuantLinear *layer, const Activations *a, int64_t first, int rows, int64_t panel, Ahead ahead,
                   float *out) {
    tiles_vnni[rows - 1](layer, a, first, panel, ahead, out);
}

#elif defined(__AVX2__)

/* Sixteen columns of up to four rows. The multiply-add of unsigned by signed bytes adds pairs in 16 bits: with the
 * weights' magnitudes (at most 128) on the unsigned side and their signs moved to the activations (at most 127) a pair
 * is at most 32,512, so nothing saturates. */
static inline __m256i add_products(__m256i sum, __m256i weight, __m256i zero_point, __m256i four) {
    __m256i centred = _mm256_sub_epi8(weight, zero_point);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(four, centred));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

static inline __m256 load_half(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

static inline __m256i four_of(const int8_t *values) {
    int32_t four;
    memcpy(&four, values, sizeof four);
    return _mm256_set1_epi32(four);
}

__attribute__((always_inline)) static inline void strip(const int rows, const int bits, const QuantLinear *layer,
                                                        const Activations *a, int64_t first, int64_t panel, int part,
                                                        float *out) {
    const int64_t segment = layer->segment, segments = layer->num_segments;
    const uint8_t *weight = layer->weight + (panel * 2 + part) * HALF * segment * segments * bits / 8;
    const int8_t *values = a->values + first * a->stride;
    const __m256i zero_point = _mm256_set1_epi8((char)layer->zero_point), low = _mm256_set1_epi8(15);
    int64_t index = panel * segments * PANEL + part * 16;
    for (int64_t s = 0; s < segments; s++, index += PANEL) {
        __m256i sums[4][2];
        for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
        for (int64_t k = 0; k < segment; k += 32 / bits, weight += 4 * HALF, values += 32 / bits) {
            for (int half = 0; half < 2; half++) {
                __m256i bytes = _mm256_loadu_si256((const __m256i *)(weight + half * 32)), high = bytes;
                if (bits == 4) {
                    high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
                    bytes = _mm256_and_si256(bytes, low);
                }
                for (int r = 0; r < rows; r++) {
                    const int8_t *row = values + r * a->stride;
                    sums[r][half] = add_products(sums[r][half], bytes, zero_point, four_of(row));
                    if (bits == 4) sums[r][half] = add_products(sums[r][half], high, zero_point, four_of(row + 4));
                }
            }
        }
        for (int half = 0; half < 2; half++) {
            int64_t at = (layer->row_scale ? panel * PANEL + part * 16 : index) + half * 8;
            __m256 scale = layer->wide_scale ? _mm256_loadu_ps((const float *)layer->scale + at)
                                             : load_half((const uint16_t *)layer->scale + at);
            for (int r = 0; r < rows; r++) {
                float *to = out + r * PANEL + part * 16 + half * 8;
                int64_t of_row = (first + r) * a->segments + s;
                __m256 total = s ? _mm256_loadu_ps(to) : _mm256_setzero_ps();
                __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][half]), _mm256_set1_ps(a->scale[of_row]));
                total = _mm256_fmadd_ps(scaled, scale, total);
                if (layer->offset)
                    total = _mm256_fmadd_ps(_mm256_set1_ps(a->sum[of_row]), load_half(layer->offset + at), total);
                _mm256_storeu_ps(to, total);
            }
        }
    }
}

#define STRIPS(rows)                                                                                                   \
    for (int part = 0; part < 2; part++) {                                                                             \
        if (layer->bits == 4)                                                                                          \
            strip(rows, 4, layer, a, first, panel, part, out);                                                         \
        else                                                                                                           \
            strip(rows, 8, layer, a, first, panel, part, out);                                                         \
    }

void multiply_tile(const QuantLinear *layer, const Activations *a, int64_t first, int rows, int64_t panel, Ahead ahead,
                   float *out) {
    for (; rows >= 4; rows -= 4, first += 4, out += 4 * PANEL) STRIPS(4)
    for (; rows >= 1; rows -= 1, first += 1, out += PANEL) STRIPS(1)
}

#else

void multiply_tile(const QuantLinear *layer, const Activations *a, int64_t first, int rows, int64_t panel, Ahead ahead,
                   float *out) {
    const int64_t segment = layer->segment, segments = layer->num_segments;
    const int64_t step = 32 / layer->bits; /* values of k in 4 * PANEL bytes */
    for (int r = 0; r < rows; r++) {
        const int64_t half_bytes = HALF * segment * segments * layer->bits / 8;
        const uint8_t *weight = layer->weight + panel * 2 * half_bytes;
        const int8_t *values = a->values + (first + r) * a->stride;
        float *to = out + r * PANEL;
        for (int c = 0; c < PANEL; c++) to[c] = 0;
        for (int64_t s = 0; s < segments; s++) {
            int64_t of_row = (first + r) * a->segments + s;
            int64_t index = (layer->row_scale ? panel : panel * segments + s) * PANEL;
            int32_t sums[PANEL];
            for (int c = 0; c < PANEL; c++) sums[c] = a->start[of_row];
            for (int64_t k = 0; k < segment; k += step, weight += 4 * HALF, values += step) {
                for (int c = 0; c < PANEL; c++) {
                    const uint8_t *four = weight + c / HALF * half_bytes + c % HALF * 4;
                    for (int i = 0; i < 4; i++) {
                        int byte = four[i];
                        if (layer->bits == 8)
                            sums[c] += byte * values[i];
                        else
                            sums[c] += (byte & 15) * values[i] + (byte >> 4) * values[i + 4];
                    }
                }
            }
            for (int c = 0; c < PANEL; c++) {
                float scale = layer->wide_scale ? ((const float *)layer->scale)[index + c]
                                                : half_to_float(((const uint16_t *)layer->scale)[index + c]);
                to[c] += (float)sums[c] * a->scale[of_row] * scale;
                if (layer->offset) to[c] += a->sum[of_row] * half_to_float(layer->offset[index + c]);
            }
        }
    }
}

#endif
