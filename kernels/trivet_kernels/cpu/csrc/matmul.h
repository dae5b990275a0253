/* Matrix products with weights of four and eight bits, and activations that are rounded to eight bits on the way in.
 *
 * A row of activations is divided into segments; within a segment all products are of integers and exact, and the
 * segments are added in float32, in order. So a result depends on its row and its column only.
 *
 *     out[r][c] = bias[c] + sum over segments s of
 *         act_scale[r][s] * (scale[s][c] * sum over k of (stored[k][c] - zero_point) * act[r][k]
 *                            + offset[s][c] * sum over k of act[r][k])
 *
 * Weights are stored unsigned, which is what the multiply-add of unsigned by signed bytes (vpdpbusd) wants; the zero
 * point enters as the start value of the integer sum. They are packed in panels of 32 columns, see PANEL below. */
#ifndef TRIVET_MATMUL_H
#define TRIVET_MATMUL_H

#include "tiles.h"

/* Columns of a panel, and of each of its halves, which follow each other. Half a panel holds, for each four (8 bits) or
 * eight (4 bits) consecutive k, 64 bytes: of every column four bytes, k ascending. With 4 bits the low halves of the bytes
 * are the first four k and the high halves the next four. Scales and offsets are [panels][segments][PANEL], or scales are
 * [panels][PANEL] with `row_scale`. */
#define PANEL 32
#define HALF (PANEL / 2)
/* Most rows of a tile, whose integer sums are held in registers. */
#define TILE 6

/* What weights of eight bits are stored exclusive-or'ed with: matrix tiles take them as signed numbers, which is faster
 * where there are many rows, and with few rows memory is slower than turning them back. */
#if HAS_TILES
#define STORED_SIGN 128
#else
#define STORED_SIGN 0
#endif

typedef struct {
    const uint8_t *weight;
    const void *scale;      /* float16, or float32 if wide_scale */
    const uint16_t *offset; /* float16, or NULL */
    const float *bias;      /* [out], or NULL */
    int64_t in_features;    /* of the activations */
    int64_t out_features;
    int64_t segment;      /* values of k with one scale, unless it is that of the row; a multiple of 16 */
    int64_t num_segments; /* segment * num_segments >= in_features; what is beyond is multiplied with zero */
    int64_t act_segments; /* segments that share a scale of the activations; it divides num_segments */
    int32_t bits;         /* 4 or 8 */
    int32_t zero_point;
    int32_t wide_scale;
    int32_t row_scale; /* a column of the result has one scale for all segments, and no offsets */
    int32_t planes; /* bytes that an activation is rounded to, 1 or 2 */
    float factor; /* of all scales and offsets */
} QuantLinear;

/* Rows of activations, rounded. With two planes each row of activations is two rows here, the rounded values and what
 * rounding has left of them with a scale of its own, and the sum of their products is the result. */
typedef struct {
    int8_t *values;
    float *scale;
    int32_t *start;   /* -zero_point * sum of the values */
    float *sum;       /* scale * sum of the values */
    int64_t stride;   /* of rows of values, in bytes */
    int64_t segments; /* the others are [rows][segments] */
    /* Rows of a unit, which are laid out together: values are [units][steps][unit][step] then, the others
     * [units][segments][unit]. A segment begins with a step and takes `padded` bytes. */
    int64_t unit, step, padded;
} Activations;

static inline int8_t *values_at(const Activations *a, int64_t row, int64_t segment) {
    return a->values + row / a->unit * a->unit * a->stride + segment * a->padded * a->unit + row % a->unit * a->step;
}

static inline int64_t index_at(const Activations *a, int64_t row, int64_t segment) {
    return (row / a->unit * a->segments + segment) * a->unit + row % a->unit;
}

/* Round row `r` of activations, whose values are at `x`, into `to`. */
void quantize_row(const QuantLinear *layer, const void *x, int dtype, const Activations *to, int64_t r);

/* Memory to bring into the second-level cache while a tile is computed: what is read next. It is a hint, which only
 * the tiles of AVX-512 VNNI follow; the others are not that fast. */
typedef struct {
    const char *from;
    int64_t lines; /* of 64 bytes, in each segment */
} Ahead;

/* The products of rows [first, first + rows) of `a`, rows <= TILE, with panel `panel`, as [rows][PANEL] float32. */
void multiply_tile(const QuantLinear *layer, const Activations *a, int64_t first, int rows, int64_t panel, Ahead ahead,
                   float *out);

static inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

static inline float half_to_float(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = (x >> 10) & 31u, fraction = x & 0x3ffu, bits;
    float value;
    if (exponent == 0) { /* zero and subnormal numbers: multiples of 2^-24 */
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | fraction << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(__AVX512VNNI__)

static inline __m512 load_half(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

static inline __m512 load_scale(const QuantLinear *layer, int64_t index) {
    if (layer->wide_scale) return _mm512_loadu_ps((const float *)layer->scale + index);
    return load_half((const uint16_t *)layer->scale + index);
}

#endif

#endif
