/* A row of logits by groups of 128 ids, each value divided by a temperature; what is ranked is picked out of them. */
#ifndef TRIVET_SAMPLING_ROW_H
#define TRIVET_SAMPLING_ROW_H

#include "sampling_exact.h"

typedef struct {
    uint64_t rank;
    int64_t weight;
} item_t;

typedef struct {
    const void *x;
    int dtype;
    int64_t size, groups; /* ids, and groups of them; the last may have fewer */
    float temperature;
    float highest;  /* NaN if there is one */
    float *maxima;  /* [groups] */
    int64_t *masses; /* [groups] weights of their values */
    item_t *items;  /* [size] */
} row_t;

#if defined(__AVX512F__)
INLINE vec_t larger(vec_t a, vec_t b) { return (vec_t)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE vec_t larger(vec_t a, vec_t b) { return (vec_t)_mm256_max_ps((__m256)a, (__m256)b); }
#else
INLINE vec_t larger(vec_t a, vec_t b) { return choose(a > b, a, b); }
#endif

/* The values of a group, -inf beyond the row's end. */
INLINE void group_values(const row_t *r, int64_t group, vec_t out[GROUP / LANES], int dtype) {
    int64_t begin = group * GROUP, count = r->size - begin;
    if (count >= GROUP) {
        for (int i = 0; i < GROUP / LANES; i++) out[i] = load(r->x, begin + i * LANES, dtype) / r->temperature;
        return;
    }
    float values[GROUP];
    for (int64_t i = 0; i < GROUP; i++)
        values[i] = i < count ? load_one(r->x, begin + i, dtype) / r->temperature : -INFINITY;
    memcpy(out, values, sizeof values);
}

INLINE float largest_lane(vec_t x) {
    float largest = x[0];
    for (int lane = 1; lane < LANES; lane++) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
}

/* Fills in the largest values of the groups and of the row. Division keeps the order: only these are divided. */
INLINE void find_maxima(row_t *r, int dtype) {
    ivec_t nan = {};
    int has_nan = 0;
    float highest = -INFINITY;
    for (int64_t group = 0; group < r->groups; group++) {
        int64_t begin = group * GROUP, count = r->size - begin;
        float largest;
        if (count >= GROUP) {
            vec_t best[2] = {splat(-INFINITY), splat(-INFINITY)};
            for (int i = 0; i < GROUP; i += 2 * LANES)
                for (int j = 0; j < 2; j++) {
                    vec_t value = load(r->x, begin + i + j * LANES, dtype);
                    nan |= value != value;
                    best[j] = larger(value, best[j]);
                }
            largest = largest_lane(larger(best[0], best[1]));
        } else {
            largest = -INFINITY;
            for (int64_t i = 0; i < count; i++) {
                float value = load_one(r->x, begin + i, dtype);
                has_nan |= value != value;
                largest = value > largest ? value : largest;
            }
        }
        r->maxima[group] = largest / r->temperature;
        highest = r->maxima[group] > highest ? r->maxima[group] : highest;
    }
    for (int lane = 0; lane < LANES; lane++) has_nan |= nan[lane];
    r->highest = has_nan ? NAN : highest;
}

/* The weights of a group's values from `least` on, together. */
INLINE int64_t group_mass(const row_t *r, int64_t group, float least, int dtype) {
    vec_t values[GROUP / LANES];
    group_values(r, group, values, dtype);
    for (int i = 0; i < GROUP / LANES; i++)
        values[i] = choose(values[i] < least, splat(FAR), values[i] - r->highest);
    return sum_of_weights(values);
}

/* Which lanes are `least` or more, as bits. */
INLINE uint32_t lanes_from(vec_t x, float least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, (__m512)splat(least), _CMP_GE_OQ);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)splat(least), _CMP_GE_OQ));
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(x[lane] >= least) << lane;
    return bits;
#endif
}

/* Lists the tokens whose values are `least` or more, with their weights or, unless `weigh`, with 1. */
INLINE int64_t list_from(const row_t *r, float least, int weigh, int dtype) {
    int64_t count = 0;
    for (int64_t group = 0; group < r->groups; group++) {
        if (r->maxima[group] < least) continue;
        vec_t values[GROUP / LANES];
        group_values(r, group, values, dtype);
        for (int i = 0; i < GROUP / LANES; i++) {
            int64_t left = r->size - group * GROUP - i * LANES;
            uint32_t there = left >= LANES ? ~0u : left > 0 ? (1u << left) - 1 : 0;
            for (uint32_t bits = lanes_from(values[i], least) & there; bits; bits &= bits - 1) {
                int lane = __builtin_ctz(bits);
                float value = values[i][lane];
                r->items[count].rank = rank_of(value, group * GROUP + i * LANES + lane);
                r->items[count++].weight = weigh ? weight_of(value - r->highest) : 1;
            }
        }
    }
    return count;
}

/* sampling_rank.c: the rank of the last of the first items, in order, that weigh `share` together (the last of all if
 * all weigh less). Items are moved, and some may be lost. */
uint64_t trivet_last_rank(item_t *items, int64_t count, int64_t share);

/* Orders items, the first in rank first. */
void trivet_order(item_t *items, int64_t count);

/* The `count`th largest of n values. */
float trivet_nth_largest(float *values, int64_t n, int64_t count);

#endif
