/* What the outcome of a draw rests on, bit for bit as in trivet_kernels.reference.exact and .noise: single IEEE
 * operations in a fixed order. Must come first in a file: nothing in it may be fused to multiply-adds. */
#ifndef TRIVET_SAMPLING_EXACT_H
#define TRIVET_SAMPLING_EXACT_H

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "elementwise_vec.h"

enum { GROUP = 128, FOR_GROUP = 0, FOR_TOKEN = 1, NO_ID = 0x7fffffff };

/* Weights are integers of this many to one; distances below FAR have weight 0. */
#define ONE 4398046511104.0
#define FAR -30.0f

/* What is added to a float32 number below 2^22 rounds it to an integer, in its low bits. */
#define MAGIC 12582912.0f

/* e to float32 numbers from FAR to 0. */
INLINE vec_t exact_exp(vec_t x) {
    vec_t shifted = x * 1.44269504f + MAGIC;
    vec_t whole = shifted - MAGIC;
    vec_t r = x - whole * 0.693145751953125f;
    r = r - whole * 1.42860682e-6f;
    vec_t p = r * 1.3926250394e-3f + 8.3632329479e-3f;
    p = p * r + 4.1666552424e-2f;
    p = p * r + 1.6666576266e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    ivec_t n = (ivec_t)shifted - (ivec_t)splat(MAGIC);
    return p * (vec_t)((n + 127) << 23);
}

/* The weights of 128 distances, together. Each is split into 20 bits and 22 more, so that lanes of 32 bits hold sums. */
INLINE int64_t sum_of_weights(const vec_t distances[GROUP / LANES]) {
    ivec_t high = {}, low = {};
    for (int i = 0; i < GROUP / LANES; i++) {
        vec_t e = exact_exp(at_least(distances[i], FAR)) * 1048576.0f;
        vec_t upper = e + MAGIC;
        vec_t rest = (e - (upper - MAGIC)) * 4194304.0f + MAGIC;
        high += (ivec_t)upper - (ivec_t)splat(MAGIC);
        low += (ivec_t)rest - (ivec_t)splat(MAGIC);
    }
    int64_t high_sum = 0, low_sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
        high_sum += high[lane];
        low_sum += low[lane];
    }
    return high_sum * 4194304 + low_sum;
}

INLINE int64_t weight_of(float distance) {
    float x = distance < FAR ? FAR : distance;
    float shifted = x * 1.44269504f + MAGIC;
    float whole = shifted - MAGIC;
    float r = x - whole * 0.693145751953125f;
    r = r - whole * 1.42860682e-6f;
    float p = r * 1.3926250394e-3f + 8.3632329479e-3f;
    p = p * r + 4.1666552424e-2f;
    p = p * r + 1.6666576266e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    double scaled = (double)(p * power) * ONE + 4503599627370496.0;
    int64_t sum;
    memcpy(&sum, &scaled, sizeof sum);
    return sum - 0x4330000000000000ll;
}

INLINE double exact_log(double x) {
    int64_t bits;
    double mantissa;
    memcpy(&bits, &x, sizeof bits);
    int64_t exponent = (bits - 0x3FE6A09E667F3BCDll) >> 52;
    bits -= exponent * (1ll << 52);
    memcpy(&mantissa, &bits, sizeof mantissa);
    double s = (mantissa - 1.0) / (mantissa + 1.0);
    double z = s * s;
    double series = 1.0 / 21;
    series = series * z + 1.0 / 19;
    series = series * z + 1.0 / 17;
    series = series * z + 1.0 / 15;
    series = series * z + 1.0 / 13;
    series = series * z + 1.0 / 11;
    series = series * z + 1.0 / 9;
    series = series * z + 1.0 / 7;
    series = series * z + 1.0 / 5;
    series = series * z + 1.0 / 3;
    double twice = s + s;
    return (double)exponent * 0.6931471805599453 + (twice + twice * (series * z));
}

/* The first two words of Philox4x32-10 for the counter (index, position, 0, purpose) under a seed. */
INLINE void philox(uint32_t index, uint32_t position, uint64_t seed, uint32_t purpose, uint32_t out[2]) {
    uint32_t c0 = index, c1 = position, c2 = 0, c3 = purpose, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t first = (uint64_t)c0 * 0xD2511F53u, second = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)second;
        c3 = (uint32_t)first;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
}

INLINE double exponential(uint32_t word) { return -exact_log(((double)word + 0.5) / 4294967296.0); }

/* What orders float32 numbers, and the other way round; -0 and 0 are equal. */
INLINE uint32_t ordered(float value) {
    uint32_t bits;
    value = value + 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

INLINE float value_of(uint32_t key) {
    uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Ranks a row's tokens: by value, equal ones by id. */
INLINE uint64_t rank_of(float value, int64_t id) { return (uint64_t)ordered(value) << 32 | (uint64_t)(NO_ID - id); }

#endif
