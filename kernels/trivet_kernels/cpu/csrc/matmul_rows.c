/* Rounding rows of activations to eight bits. */
#include "matmul.h"

/* Steps of the second plane in one of the first: half of one is 127. */
#define FINER 254.0f

/* Magnitudes are compared by their bits, as integers: NaN is the largest of all and is not lost. */
static inline float magnitude(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(__AVX512F__)

static inline __m512 load(const void *x, int dtype, int64_t k, int64_t count) {
    __mmask16 mask = count - k >= 16 ? (__mmask16)0xffff : count <= k ? 0 : (__mmask16)((1u << (count - k)) - 1);
    if (dtype == TRIVET_F32) return _mm512_maskz_loadu_ps(mask, (const float *)x + k);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, (const bf16_t *)x + k);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

static inline uint32_t largest(const void *x, int dtype, int64_t begin, int64_t end, int64_t count) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = begin; k < end; k += 16) {
        __m512i bits = _mm512_castps_si512(_mm512_abs_ps(load(x, dtype, k, count)));
        most = _mm512_max_epu32(most, bits);
    }
    return _mm512_reduce_max_epu32(most);
}

/* Values of [begin, end) times `inverse`, rounded; or, in plane 1, what that leaves. They go to `to`, where steps are
 * `apart` bytes apart. Returns their sum. */
static inline int32_t round_values(const void *x, int dtype, int64_t begin, int64_t end, int64_t count, float inverse,
                                   int plane, int8_t *to, int64_t step, int64_t apart) {
    __m512i sum = _mm512_setzero_si512();
    __m512 factor = _mm512_set1_ps(inverse), finer = _mm512_set1_ps(FINER);
    for (int64_t k = begin; k < end; k += 16) {
        __m512 scaled = _mm512_mul_ps(load(x, dtype, k, count), factor);
        if (plane) scaled = _mm512_mul_ps(_mm512_sub_ps(scaled, _mm512_roundscale_ps(scaled, 8)), finer);
        __m128i values = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(scaled));
        sum = _mm512_add_epi32(sum, _mm512_cvtepi8_epi32(values));
        int8_t *at = to + (k - begin) / step * apart + (k - begin) % step;
        _mm_storeu_si128((__m128i *)at, values);
    }
    return _mm512_reduce_add_epi32(sum);
}

/* Both of the above for `size` values, 32, 64 or 128, that stay in registers in between; 64 bytes are a step, or a part
 * of one. Returns the largest magnitude's bits, and their sum in `sum`. */
__attribute__((always_inline)) static inline uint32_t round_whole(const int size, const int dtype, const void *x,
                                                                  int64_t k, int8_t *to, int64_t apart, int32_t *sum) {
    /* Order of the lanes' fours after two rounds of packing. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 values[8];
    __m512i most = _mm512_setzero_si512(), sums = _mm512_setzero_si512();
    for (int i = 0; i < size / 16; i++) {
        if (dtype == TRIVET_F32) {
            values[i] = _mm512_loadu_ps((const float *)x + k + i * 16);
        } else {
            __m256i halves = _mm256_loadu_si256((const __m256i *)((const bf16_t *)x + k + i * 16));
            values[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        }
        most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(values[i])));
    }
    uint32_t bits = _mm512_reduce_max_epu32(most);
    __m512 factor = _mm512_set1_ps(magnitude(bits) > 0 ? 127 / magnitude(bits) : 0);
    for (int i = 0; i < size / 16; i += 4) {
        __m512i rounded[4];
        for (int j = 0; j < 4; j++)
            rounded[j] = i + j < size / 16 ? _mm512_cvtps_epi32(_mm512_mul_ps(values[i + j], factor))
                                           : _mm512_setzero_si512();
        __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(rounded[0], rounded[1]),
                                           _mm512_packs_epi32(rounded[2], rounded[3]));
        bytes = _mm512_permutexvar_epi32(order, bytes);
        /* The sum of absolute differences of unsigned bytes, with 128 added to each. */
        __m512i shifted = _mm512_xor_si512(bytes, _mm512_set1_epi8((char)128));
        sums = _mm512_add_epi64(sums, _mm512_sad_epu8(shifted, _mm512_setzero_si512()));
        if (size == 32) _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(bytes));
        else _mm512_storeu_si512(to + i / 4 * apart, bytes);
    }
    *sum = (int32_t)_mm512_reduce_add_epi64(sums) - 128 * (size < 64 ? 64 : size);
    return bits;
}

/* Segments of a row, of `size` values and each with a scale of its own. Returns how many were whole, and are done. */
__attribute__((always_inline)) static inline int64_t round_segments(const int size, const int dtype,
                                                                    const QuantLinear *layer, const void *x,
                                                                    const Activations *to, int64_t r) {
    const int64_t whole = layer->in_features / size;
    const int64_t apart = to->unit > 1 ? to->unit * to->step : 64;
    for (int64_t s = 0; s < whole; s++) {
        const int64_t index = index_at(to, r, s);
        int32_t sum;
        float most = magnitude(round_whole(size, dtype, x, s * size, values_at(to, r, s), apart, &sum));
        float scale = most / 127 * layer->factor;
        to->scale[index] = scale;
        to->start[index] = (int32_t)(-(uint32_t)layer->zero_point * (uint32_t)sum);
        to->sum[index] = scale * (float)sum;
    }
    return whole;
}

static int64_t round_most(const QuantLinear *layer, const void *x, int dtype, const Activations *to, int64_t r) {
    if (layer->planes > 1 || layer->act_segments > 1) return 0;
    /* Constants in the calls make a loop of its own for each case. */
#define SEGMENTS(size)                                                                                                 \
    if (layer->segment == size)                                                                                        \
        return dtype == TRIVET_F32 ? round_segments(size, TRIVET_F32, layer, x, to, r)                                 \
                                   : round_segments(size, TRIVET_BF16, layer, x, to, r);
    SEGMENTS(32)
    SEGMENTS(64)
    SEGMENTS(128)
#undef SEGMENTS
    return 0;
}

#else

static int64_t round_most(const QuantLinear *layer, const void *x, int dtype, const Activations *to, int64_t r) {
    (void)layer, (void)x, (void)dtype, (void)to, (void)r;
    return 0;
}

static inline float load(const void *x, int dtype, int64_t k, int64_t count) {
    if (k >= count) return 0;
    return dtype == TRIVET_F32 ? ((const float *)x)[k] : bf16_to_float(((const bf16_t *)x)[k]);
}

static inline uint32_t largest(const void *x, int dtype, int64_t begin, int64_t end, int64_t count) {
    uint32_t most = 0;
    for (int64_t k = begin; k < end; k++) {
        float value = load(x, dtype, k, count);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bits &= 0x7fffffffu;
        if (bits > most) most = bits;
    }
    return most;
}

static inline int32_t round_values(const void *x, int dtype, int64_t begin, int64_t end, int64_t count, float inverse,
                                   int plane, int8_t *to, int64_t step, int64_t apart) {
    int32_t sum = 0;
    for (int64_t k = begin; k < end; k++) {
        float scaled = load(x, dtype, k, count) * inverse;
        if (plane) scaled = (scaled - rintf(scaled)) * FINER;
        float value = rintf(scaled);
        int32_t rounded = value >= -127 && value <= 127 ? (int32_t)value : -127;
        to[(k - begin) / step * apart + (k - begin) % step] = (int8_t)rounded;
        sum += rounded;
    }
    return sum;
}

#endif

void quantize_row(const QuantLinear *layer, const void *x, int dtype, const Activations *to, int64_t r) {
    const int64_t segment = layer->segment, group = layer->act_segments, count = layer->in_features;
    for (int64_t s = round_most(layer, x, dtype, to, r); s < layer->num_segments; s += group) {
        float most = magnitude(largest(x, dtype, s * segment, (s + group) * segment, count));
        float inverse = most > 0 ? 127 / most : 0, scale = most / 127 * layer->factor;
        for (int plane = 0; plane < layer->planes; plane++, scale /= FINER) {
            int64_t row = r * layer->planes + plane;
            for (int64_t i = s; i < s + group; i++) {
                int64_t index = index_at(to, row, i);
                int32_t sum = round_values(x, dtype, i * segment, (i + 1) * segment, count, inverse, plane,
                                           values_at(to, row, i), to->step, to->unit * to->step);
                to->scale[index] = scale;
                to->start[index] = (int32_t)(-(uint32_t)layer->zero_point * (uint32_t)sum);
                to->sum[index] = scale * (float)sum;
            }
        }
    }
}
