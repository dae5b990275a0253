/* Rounding weights to four bits so that the squared error is small: several ways to lay the levels are tried for every
 * group, the scale (and offset) of each is fitted by least squares to what the weights were rounded to, and the weights
 * are rounded again to the best of them. */
#include "common.h"

#define GROUP 32
#define SHRINKS 4
#define DIVISORS 6
#define REFINEMENTS 2

/* How far the ends of the range are drawn in before sixteen levels are laid between them. */
static const float shrinks[SHRINKS] = {1.0f, 0.93f, 0.86f, 0.79f};
/* What the value of the largest magnitude is divided by, on the side that has eight levels. */
static const float divisors[DIVISORS] = {-8.8f, -8.4f, -8.0f, -7.6f, -7.2f, -6.8f};

typedef struct {
    float error, scale, offset;
    float values[GROUP];
} Rounding;

/* Round to the levels `scale * (low ... low + 15) + offset`. */
static inline void round_group(const float *x, float scale, float offset, float low, float *values) {
    float inverse = scale != 0 ? 1 / scale : 0;
    /* One limit to a loop: of two in one, compilers make branches and no vectors. */
#pragma omp simd
    for (int i = 0; i < GROUP; i++) {
        float level = (x[i] - offset) * inverse - low;
        values[i] = level > 0 ? level : 0;
    }
#pragma omp simd
    for (int i = 0; i < GROUP; i++) values[i] = values[i] < 15 ? values[i] : 15;
#pragma omp simd
    for (int i = 0; i < GROUP; i++) values[i] = (float)(int32_t)(values[i] + 0.5f) + low;
}

/* Fit scale and offset to the values, and take them if they are better than what there is. */
static inline void fit(const float *x, float mean, int offsets, float step, float start, Rounding *trial,
                       Rounding *best) {
    float sum = 0, square = 0, product = 0, error = 0;
    const float *v = trial->values;
#pragma omp simd reduction(+ : sum, square, product)
    for (int i = 0; i < GROUP; i++) {
        sum += v[i];
        square += v[i] * v[i];
        product += v[i] * x[i];
    }
    if (offsets) {
        float variance = square - sum * sum / GROUP;
        trial->scale = variance > 0.5f ? (product - sum * mean) / variance : step;
        trial->offset = variance > 0.5f ? mean - trial->scale * sum / GROUP : start;
    } else {
        trial->scale = square > 0 ? product / square : 0;
        trial->offset = 0;
    }
    const float scale = trial->scale, offset = trial->offset;
#pragma omp simd reduction(+ : error)
    for (int i = 0; i < GROUP; i++) {
        float difference = scale * v[i] + offset - x[i];
        error += difference * difference;
    }
    trial->error = error;
    if (error < best->error) *best = *trial;
}

static inline void try(const float *x, float mean, int offsets, float step, float start, Rounding *best) {
    Rounding trial;
    round_group(x, step, start, offsets ? 0 : -8, trial.values);
    fit(x, mean, offsets, step, start, &trial, best);
}

/* Round `count` groups of 32 weights: to sixteen levels anywhere if there are `offsets`, otherwise to -8 ... 7 times a
 * scale. `values` (0 ... 15) is [count][32], `scale` and `offset` (NULL without offsets) are [count]. */
void trivet_round_four(const float *weights, int64_t count, uint8_t *values, float *scale, float *offset,
                       int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
    for (int64_t g = 0; g < count; g++) {
        const float *x = weights + g * GROUP;
        float lowest = x[0], highest = x[0], mean = 0;
#pragma omp simd reduction(min : lowest) reduction(max : highest) reduction(+ : mean)
        for (int i = 0; i < GROUP; i++) {
            lowest = x[i] < lowest ? x[i] : lowest;
            highest = x[i] > highest ? x[i] : highest;
            mean += x[i] / GROUP;
        }
        Rounding best = {.error = INFINITY};
        if (offset) {
            float middle = (highest + lowest) / 2, half = (highest - lowest) / 2;
            for (int i = 0; i < SHRINKS; i++)
                try(x, mean, 1, half * shrinks[i] / 7.5f, middle - half * shrinks[i], &best);
        } else {
            float extreme = -lowest > highest ? lowest : highest;
            for (int i = 0; i < DIVISORS; i++) try(x, mean, 0, extreme / divisors[i], 0, &best);
        }
        for (int i = 0; i < REFINEMENTS; i++) try(x, mean, offset != NULL, best.scale, best.offset, &best);
        scale[g] = best.scale;
        if (offset) offset[g] = best.offset;
        for (int i = 0; i < GROUP; i++) values[g * GROUP + i] = (uint8_t)(best.values[i] + (offset ? 0 : 8));
        /* Nothing is better than infinity where weights are not finite; that must show. */
        if (!(best.error < INFINITY)) scale[g] = NAN;
    }
}
