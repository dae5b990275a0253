/* Vectors of floats as wide as the level's registers, in GCC's and clang's vector extensions, and what the elementwise
 * kernels compute with them. Nothing here depends on where in a row a vector stands. */
#ifndef TRIVET_ELEMENTWISE_VEC_H
#define TRIVET_ELEMENTWISE_VEC_H

#include "common.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec_t __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec_t __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec_t __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec_t __attribute__((vector_size(LANES * 2)));

INLINE vec_t splat(float value) { return (vec_t){} + value; }

INLINE vec_t choose(ivec_t mask, vec_t yes, vec_t no) { return (vec_t)((mask & (ivec_t)yes) | (~mask & (ivec_t)no)); }

/* Smaller and larger of a vector and a bound (NaN stays NaN), and conversions from bfloat16 and to the nearest one, as
 * in common.h. The compilers make much longer code of the generic ones. */
#if defined(__AVX512F__)

INLINE vec_t at_most(vec_t x, float bound) { return (vec_t)_mm512_min_ps((__m512)splat(bound), (__m512)x); }
INLINE vec_t at_least(vec_t x, float bound) { return (vec_t)_mm512_max_ps((__m512)splat(bound), (__m512)x); }
INLINE vec_t widen_bf16(hvec_t x) { return (vec_t)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16); }

#elif defined(__AVX2__)

INLINE vec_t at_most(vec_t x, float bound) { return (vec_t)_mm256_min_ps((__m256)splat(bound), (__m256)x); }
INLINE vec_t at_least(vec_t x, float bound) { return (vec_t)_mm256_max_ps((__m256)splat(bound), (__m256)x); }
INLINE vec_t widen_bf16(hvec_t x) { return (vec_t)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16); }

#else

INLINE vec_t at_most(vec_t x, float bound) { return choose(x > bound, splat(bound), x); }
INLINE vec_t at_least(vec_t x, float bound) { return choose(x < bound, splat(bound), x); }
INLINE vec_t widen_bf16(hvec_t x) { return (vec_t)(__builtin_convertvector(x, uvec_t) << 16); }

#endif

#if defined(__AVX512BF16__)

/* Unlike the others it takes numbers below the smallest normal one, 1.2e-38, for 0. */
INLINE hvec_t round_to_bf16(vec_t x) { return (hvec_t)_mm512_cvtneps_pbh((__m512)x); }

#else

INLINE hvec_t round_to_bf16(vec_t x) {
    uvec_t bits = (uvec_t)x, nan = (uvec_t)(x != x);
    uvec_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    rounded = ((rounded & ~nan) | ((bits | 0x400000u) & nan)) >> 16;
#if defined(__AVX512F__)
    return (hvec_t)_mm512_cvtepi32_epi16((__m512i)rounded);
#elif defined(__AVX2__)
    __m256i packed = _mm256_packus_epi32((__m256i)rounded, (__m256i)rounded);
    return (hvec_t)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector(rounded, hvec_t);
#endif
}

#endif

INLINE float load_one(const void *x, int64_t i, int dtype) {
    return dtype == TRIVET_F32 ? ((const float *)x)[i] : bf16_to_float(((const bf16_t *)x)[i]);
}

/* Elements i … i + LANES - 1 of x. */
INLINE vec_t load(const void *x, int64_t i, int dtype) {
    vec_t out;
    hvec_t narrow;
    if (dtype == TRIVET_F32) {
        memcpy(&out, (const float *)x + i, sizeof out);
        return out;
    }
    memcpy(&narrow, (const bf16_t *)x + i, sizeof narrow);
    return widen_bf16(narrow);
}

INLINE void store(void *x, int64_t i, vec_t value, int dtype) {
    hvec_t narrow;
    if (dtype == TRIVET_F32) {
        memcpy((float *)x + i, &value, sizeof value);
    } else {
        narrow = round_to_bf16(value);
        memcpy((bf16_t *)x + i, &narrow, sizeof narrow);
    }
}

/* As above for the first `count` < LANES lanes; the others are 0, and are not written. */
INLINE vec_t load_part(const void *x, int64_t i, int64_t count, int dtype) {
    vec_t out = {};
    hvec_t narrow = {};
    if (dtype == TRIVET_F32) {
        memcpy(&out, (const float *)x + i, (size_t)count * 4);
        return out;
    }
    memcpy(&narrow, (const bf16_t *)x + i, (size_t)count * 2);
    return widen_bf16(narrow);
}

INLINE void store_part(void *x, int64_t i, int64_t count, vec_t value, int dtype) {
    hvec_t narrow;
    if (dtype == TRIVET_F32) {
        memcpy((float *)x + i, &value, (size_t)count * 4);
    } else {
        narrow = round_to_bf16(value);
        memcpy((bf16_t *)x + i, &narrow, (size_t)count * 2);
    }
}

INLINE float sum_of_lanes(vec_t x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

/* Calls work(arguments, i) for i in 0 … count - 1. Even a team of one thread takes OpenMP half a microsecond to form, as
 * long as a row of some hundred elements takes. */
INLINE void for_each(void (*work)(const void *, int64_t), const void *arguments, int64_t count, int64_t num_threads) {
    if (num_threads <= 1) {
        for (int64_t i = 0; i < count; i++) work(arguments, i);
        return;
    }
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t i = 0; i < count; i++) work(arguments, i);
}

INLINE int64_t size_of(int64_t dtype) { return dtype == TRIVET_F32 ? 4 : 2; }

/* e^x within 1 ulp where that is a normal number; inf where that is too large, NaN of NaN.
 * x = n ln 2 + r, |r| <= ln 2 / 2 with ln 2 in two parts (Cody and Waite), a polynomial of r that is nearly the best one
 * (interpolated in Chebyshev points), and a product with 2^n. */
INLINE vec_t vec_exp(vec_t x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to an integer */
    x = at_most(at_least(x, -104.0f), 89.0f);
    vec_t shifted = x * 1.44269504f + magic;
    vec_t whole = shifted - magic;
    vec_t r = x - whole * 0.693145751953125f;
    r = r - whole * 1.42860682e-6f;
    vec_t p = splat(1.3926250394e-3f);
    p = p * r + 8.3632329479e-3f;
    p = p * r + 4.1666552424e-2f;
    p = p * r + 1.6666576266e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    return (vec_t)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    ivec_t n = (ivec_t)shifted - (ivec_t)splat(magic);
    ivec_t half = n >> 1; /* in two steps, so that neither overflows early */
    return p * (vec_t)((half + 127) << 23) * (vec_t)((n - half + 127) << 23);
#endif
}

INLINE vec_t vec_silu(vec_t x) { return x / (1.0f + vec_exp(-x)); }

/* x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3); the second factor is twice the logistic function of 2u. */
INLINE vec_t vec_gelu_tanh(vec_t x) {
    vec_t u = x * (1.0f + 0.044715f * (x * x));
    return x / (1.0f + vec_exp(u * -1.5957691216f));
}

/* x times the normal distribution function: erfc(|x| / sqrt 2) / 2 is e^(-x²/2) times a polynomial of
 * (|x| - 3.5) / (|x| + 3.5), interpolated in Chebyshev points on [0, 14.5]; relative error 1e-7. */
INLINE vec_t vec_gelu_erf(vec_t x) {
    vec_t size = (vec_t)((ivec_t)x & 0x7fffffff);
    vec_t near = at_most(size, 14.5f);
    vec_t t = (near - 3.5f) / (near + 3.5f);
    vec_t p = splat(-2.0696888897e-5f);
    p = p * t - 5.1644325140e-5f;
    p = p * t + 1.3402132026e-4f;
    p = p * t + 3.8985686842e-4f;
    p = p * t - 1.3816604624e-3f;
    p = p * t - 1.5613664873e-3f;
    p = p * t + 1.9065648317e-2f;
    p = p * t - 6.1639428139e-2f;
    p = p * t + 1.2585525215e-1f;
    p = p * t - 1.8713970482e-1f;
    p = p * t + 1.0634515434e-1f;
    vec_t tail = p * vec_exp(-0.5f * (size * size));
    return x * choose(x < 0.0f, tail, 1.0f - tail);
}

#endif
