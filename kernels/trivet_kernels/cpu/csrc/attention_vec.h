/* Vectors of the widest registers that the level has, by the compiler's vector extensions: the same code serves every
 * level and processor, and intrinsics stand only where the extensions have no word for an instruction. */
#ifndef TRIVET_ATTENTION_VEC_H
#define TRIVET_ATTENTION_VEC_H

#include "common.h"

#if defined(__AVX512F__)
#define FULL 16
#elif defined(__AVX2__)
#define FULL 8
#else
#define FULL 4
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* The maximum before any score, and where products are of floats the scores of keys that a query does not see: finite,
 * so that differences are. */
#define HIDDEN (-3e38f)

/* How far (in powers of two) scores may be above the maximum that sums are relative to. */
#define FAR_ABOVE 8.0f

#define LOG2E 1.4426950408889634f

#define VECTORS(n)                                                                                                     \
    typedef float vf##n __attribute__((vector_size(4 * (n)), may_alias));                                              \
    typedef int32_t vi##n __attribute__((vector_size(4 * (n)), may_alias));                                            \
    ALWAYS_INLINE vf##n vf##n##_splat(float x) { return (vf##n){0} + x; }                                              \
    ALWAYS_INLINE vf##n vf##n##_select(vi##n mask, vf##n a, vf##n b) {                                                 \
        return (vf##n)(((vi##n)a & mask) | ((vi##n)b & ~mask));                                                        \
    }

#define PLAIN_ARITHMETIC(n)                                                                                            \
    ALWAYS_INLINE vf##n vf##n##_max(vf##n a, vf##n b) { return vf##n##_select(a > b, a, b); }                          \
    ALWAYS_INLINE vf##n vf##n##_add(vf##n sum, vf##n a, vf##n b) { return sum + a * b; }

/* max(a, b) is b where either is NaN. add(sum, a, b) is sum + a * b, by one instruction where there is one, so that the
 * compiler has no choice of what to fuse.
 * exp2 is for arguments up to 0, with a relative error of 1e-7, exactly 1 at 0 and at least 2^-125: the argument is
 * split into a whole number, which is added to the exponent, and a rest in [-0.5, 0.5], for which a polynomial was
 * fitted to the relative error. NaN stays NaN. */
#define FUNCTIONS(n)                                                                                                   \
    ALWAYS_INLINE vf##n vf##n##_exp2(vf##n x) {                                                                        \
        x = vf##n##_max(vf##n##_splat(-125.0f), x);                                                                    \
        const vf##n whole = x + 12582912.0f; /* 1.5 * 2^23: no bits are left behind the point */                       \
        const vf##n rest = x - (whole - 12582912.0f);                                                                  \
        vf##n sum = rest * 1.326472707e-03f + 9.671512649e-03f;                                                        \
        sum = rest * sum + 5.550733744e-02f;                                                                           \
        sum = rest * sum + 2.402224209e-01f;                                                                           \
        sum = rest * sum + 6.931469776e-01f;                                                                           \
        sum = rest * sum + 1.0f;                                                                                       \
        return (vf##n)((vi##n)sum + ((vi##n)whole << 23));                                                             \
    }                                                                                                                  \
    /* c * tanh(x / c) */                                                                                              \
    ALWAYS_INLINE vf##n vf##n##_cap(vf##n x, float c) {                                                                \
        const vf##n size = (vf##n)((vi##n)x & 0x7fffffff);                                                             \
        const vf##n small = vf##n##_exp2(size * (-2.0f * LOG2E / c));                                                  \
        const vf##n capped = c * (1.0f - small) / (1.0f + small);                                                      \
        return (vf##n)((vi##n)capped | ((vi##n)x & (int32_t)0x80000000));                                              \
    }

/* 2^x for what is rounded to bfloat16 next, with a relative error of 9e-5, exactly 1 at 0; 0 where x is -infinity. */
#define ROUGH_EXP2(n, bits)                                                                                            \
    ALWAYS_INLINE vf##n vf##n##_rough_exp2(vf##n x) {                                                                  \
        const vf##n rest = (vf##n)_mm##bits##_reduce_ps((__m##bits)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);      \
        vf##n sum = vf##n##_add(vf##n##_splat(2.276449850e-01f), rest, vf##n##_splat(7.706704770e-02f));               \
        sum = vf##n##_add(vf##n##_splat(6.951167878e-01f), rest, sum);                                                 \
        sum = vf##n##_add(vf##n##_splat(1.0f), rest, sum);                                                             \
        return (vf##n)_mm##bits##_scalef_ps((__m##bits)sum, (__m##bits)x); /* which takes the whole number below x */  \
    }

#if defined(__AVX512F__)
VECTORS(16)
ALWAYS_INLINE vf16 vf16_max(vf16 a, vf16 b) { return (vf16)_mm512_max_ps((__m512)a, (__m512)b); }
ALWAYS_INLINE vf16 vf16_add(vf16 sum, vf16 a, vf16 b) {
    return (vf16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}
FUNCTIONS(16)
#endif

#if defined(__AVX2__)
VECTORS(8)
ALWAYS_INLINE vf8 vf8_max(vf8 a, vf8 b) { return (vf8)_mm256_max_ps((__m256)a, (__m256)b); }
ALWAYS_INLINE vf8 vf8_add(vf8 sum, vf8 a, vf8 b) { return (vf8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum); }
FUNCTIONS(8)
#if defined(__AVX512BF16__)
ROUGH_EXP2(16, 512)
ROUGH_EXP2(8, 256)
ALWAYS_INLINE int vf16_any(vi16 x) { return _mm512_movepi32_mask((__m512i)x) != 0; }
ALWAYS_INLINE int vf8_any(vi8 x) { return _mm256_movepi32_mask((__m256i)x) != 0; }

/* The bfloat16 of two vectors, side by side in each lane. */
ALWAYS_INLINE vi16 vf16_pair(vf16 even, vf16 odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vi16)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}
ALWAYS_INLINE vi8 vf8_pair(vf8 even, vf8 odd) {
    const __m256i order = _mm256_set_epi16(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    return (vi8)_mm256_permutexvar_epi16(order, (__m256i)_mm256_cvtne2ps_pbh((__m256)odd, (__m256)even));
}

/* The same by instructions that take less time together, with ties rounded up; of what is not negative. */
ALWAYS_INLINE vi16 vf16_rough_pair(vf16 even, vf16 odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    return (vi16)_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16),
                                         _mm512_add_epi32((__m512i)odd, half));
}
ALWAYS_INLINE vi8 vf8_rough_pair(vf8 even, vf8 odd) {
    const __m256i half = _mm256_set1_epi32(0x8000);
    return (vi8)_mm256_mask_blend_epi16(0xaaaa, _mm256_srli_epi32(_mm256_add_epi32((__m256i)even, half), 16),
                                        _mm256_add_epi32((__m256i)odd, half));
}

/* Rows to columns, of 16 x 16 pairs. */
ALWAYS_INLINE void turn(__m512i *a) {
    __m512i b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i even_up = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        const __m512i odd_up = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        const __m512i even_low = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
        b[i] = _mm512_shuffle_i32x4(even_up, even_low, 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(odd_up, odd_low, 0x88);
        b[i + 8] = _mm512_shuffle_i32x4(even_up, even_low, 0xdd);
        b[i + 12] = _mm512_shuffle_i32x4(odd_up, odd_low, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = b[i];
}
#endif
#else
VECTORS(4)
PLAIN_ARITHMETIC(4)
FUNCTIONS(4)
#endif

#endif
