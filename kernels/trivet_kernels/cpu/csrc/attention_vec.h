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

/* Scores of keys that a query does not see, and the maximum before any score: finite, so that differences are. */
#define HIDDEN (-3e38f)

#define LOG2E 1.4426950408889634f

#define VECTORS(n)                                                                                                     \
    typedef float vf##n __attribute__((vector_size(4 * (n)), may_alias));                                              \
    typedef int32_t vi##n __attribute__((vector_size(4 * (n)), may_alias));                                            \
    ALWAYS_INLINE vf##n vf##n##_splat(float x) { return (vf##n){0} + x; }                                              \
    ALWAYS_INLINE vf##n vf##n##_select(vi##n mask, vf##n a, vf##n b) {                                                 \
        return (vf##n)(((vi##n)a & mask) | ((vi##n)b & ~mask));                                                        \
    }

#define PLAIN_ARITHMETIC(n)                                                                                                   \
    ALWAYS_INLINE vf##n vf##n##_max(vf##n a, vf##n b) { return vf##n##_select(a > b, a, b); }                          \
    ALWAYS_INLINE vf##n vf##n##_add(vf##n sum, vf##n a, vf##n b) { return sum + a * b; }

/* max(a, b) is b where either is NaN. add(sum, a, b) is sum + a * b, by one instruction where there is one, so that the
 * compiler has no choice of what to fuse.
 * exp2 is for arguments up to 0, with a relative error of 1e-7 (1e-4 if `rough`), exactly 1 at 0 and at least 2^-125:
 * the argument is split into a whole number, which is added to the exponent, and a rest in [-0.5, 0.5], for which
 * polynomials were fitted to the relative error. NaN stays NaN. */
#define FUNCTIONS(n)                                                                                                   \
    ALWAYS_INLINE vf##n vf##n##_exp2(vf##n x, const int rough) {                                                       \
        x = vf##n##_max(vf##n##_splat(-125.0f), x);                                                                    \
        const vf##n whole = x + 12582912.0f; /* 1.5 * 2^23: no bits are left behind the point */                       \
        const vf##n rest = x - (whole - 12582912.0f);                                                                  \
        vf##n sum = rest * 1.326472707e-03f + 9.671512649e-03f;                                                        \
        sum = rest * sum + 5.550733744e-02f;                                                                           \
        sum = rest * sum + 2.402224209e-01f;                                                                           \
        sum = rest * sum + 6.931469776e-01f;                                                                           \
        if (rough) sum = rest * (rest * 5.500893000e-02f + 2.422109596e-01f) + 6.932829273e-01f;                       \
        sum = rest * sum + 1.0f;                                                                                       \
        return (vf##n)((vi##n)sum + ((vi##n)whole << 23));                                                             \
    }                                                                                                                  \
    /* c * tanh(x / c) */                                                                                              \
    ALWAYS_INLINE vf##n vf##n##_cap(vf##n x, float c) {                                                                \
        const vf##n size = (vf##n)((vi##n)x & 0x7fffffff);                                                             \
        const vf##n small = vf##n##_exp2(size * (-2.0f * LOG2E / c), 0);                                               \
        const vf##n capped = c * (1.0f - small) / (1.0f + small);                                                      \
        return (vf##n)((vi##n)capped | ((vi##n)x & (int32_t)0x80000000));                                              \
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
#else
VECTORS(4)
PLAIN_ARITHMETIC(4)
FUNCTIONS(4)
#endif

#endif
