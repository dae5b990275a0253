/* What all native kernels share: bfloat16 conversions, and names of what the level that they are compiled for has.
 *
 * Conventions: matrices are row-major with the stride between rows given in elements; sizes and strides are int64_t;
 * every parallel loop takes the number of threads from its caller and gives every result the same operations in the
 * same order however many there are, so that a row's result depends neither on its neighbours nor on the machine's
 * load. */
#ifndef TRIVET_COMMON_H
#define TRIVET_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef uint16_t bf16_t; /* the bits of a bfloat16 */

/* Element types of arguments called `dtype`; the order is that of trivet_kernels.cpu.types. */
enum { TRIVET_F32 = 0, TRIVET_BF16 = 1 };

static inline float bf16_to_float(bf16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To nearest, ties to even, as torch rounds; NaN stays NaN. */
static inline bf16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16_t)((bits >> 16) | 0x40u);
    return (bf16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#endif
