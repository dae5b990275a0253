/* Panels of a product with matrix tiles: integer sums of 32 rows and 32 columns at a time. */
#include "matmul_tiles.h"

#if HAS_TILES

/* Inputs whose weights are multiplied with all rows before the next ones are: they should stay in the first-level
 * cache meanwhile. */
#define BLOCK_INPUTS 512
/* Fewer rows are as fast without tiles, of weights of eight and of four bits. */
#define FEWEST_ROWS_8 7
#define FEWEST_ROWS_4 13
/* int32 sums of a segment, for as many rows and columns as are computed together. */
#define SEGMENT_SUMS (2 * TILE_ROWS * PANEL)

/* Tile registers: sums of two by two tiles, two of activations, two of weights. A row of weights of a panel has the
 * columns of both. */
#define ACTIVATIONS_0 4
#define ACTIVATIONS_1 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

/* How sums become totals: by a scale per segment and column, by that and an offset, or by the activations' alone. */
enum { SCALES, OFFSETS, ROW_SCALES };

/* Sums of a segment that were stored, or will be, and wait for being scaled. */
typedef struct {
    const int32_t *sums;
    const float *scale, *offset;      /* [PANEL] */
    const float *act_scale, *act_sum; /* of the first row */
    float *totals;
    int rows;
    __mmask16 started; /* all ones unless the totals have nothing yet */
} Pending;

/* Add the sums of rows [begin, end) to the totals, with the operations of the other kernels and in their order, so that
 * results are the same to the bit. */
__attribute__((always_inline)) static inline void scale_rows(const int kind, const Pending *p, int64_t act_stride,
                                                             int begin, int end) {
    __m512 scale[2], offset[2];
    for (int half = 0; half < 2 && kind != ROW_SCALES; half++) {
        scale[half] = _mm512_loadu_ps(p->scale + half * 16);
        if (kind == OFFSETS) offset[half] = _mm512_loadu_ps(p->offset + half * 16);
    }
    for (int r = begin; r < end; r++) {
        float *to = p->totals + r * PANEL;
        __m512 of_row = _mm512_set1_ps(p->act_scale[r * act_stride]);
        for (int half = 0; half < 2; half++) {
            __m512 total = _mm512_maskz_loadu_ps(p->started, to + half * 16);
            __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(p->sums + r * PANEL + half * 16));
            if (kind == ROW_SCALES) total = _mm512_fmadd_ps(sum, of_row, total);
            else total = _mm512_fmadd_ps(_mm512_mul_ps(sum, of_row), scale[half], total);
            if (kind == OFFSETS)
                total = _mm512_fmadd_ps(_mm512_set1_ps(p->act_sum[r * act_stride]), offset[half], total);
            _mm512_storeu_ps(to + half * 16, total);
        }
    }
}

static int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

/* Bytes of a row of activations that a tile holds: whole segments if they are short, since more would only be
 * multiplied with zeros. */
static int step_of(const QuantLinear *layer) { return layer->segment < TILE_BYTES ? (int)layer->segment : TILE_BYTES; }

static int64_t padded_segment(const QuantLinear *layer) { return round_up(layer->segment, step_of(layer)); }

static int64_t block_segments(const QuantLinear *layer) {
    int64_t segments = BLOCK_INPUTS / padded_segment(layer);
    if (segments < 1) segments = 1;
    return segments < layer->num_segments ? segments : layer->num_segments;
}

int tiles_suit(const QuantLinear *layer, int64_t rows) {
    if (layer->bits == 8) return rows >= FEWEST_ROWS_8 && layer->zero_point == 128;
    return rows >= FEWEST_ROWS_4 && layer->zero_point >= 0 && layer->zero_point <= 128;
}

TileRows tile_rows_of(int64_t rows) {
    int64_t units = (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), height = units ? (rows + units - 1) / units : 1;
    int two = height > TILE_ROWS;
    return (TileRows){.rows = (int)(two ? (height + 1) / 2 : height), .tiles = two ? 2 : 1};
}

void begin_tiles(const QuantLinear *layer, TileRows shape) {
    tile_shapes_t shapes = {0};
    const int step = step_of(layer);
    for (int tile = 0; tile < 4; tile++) shape_tile(&shapes, tile, shape.rows, TILE_BYTES);
    shape_tile(&shapes, ACTIVATIONS_0, shape.rows, step);
    shape_tile(&shapes, ACTIVATIONS_1, shape.rows, step);
    shape_tile(&shapes, WEIGHTS_0, step / 4, TILE_BYTES);
    shape_tile(&shapes, WEIGHTS_1, step / 4, TILE_BYTES);
    use_shapes(&shapes);
}

void end_tiles(void) { _tile_release(); }

/* What a thread has for itself. */
typedef struct {
    int8_t *weights; /* of a block, four inputs of every column together as in a panel, segments padded with zeros */
    float *scale, *offset; /* [segments][PANEL] */
    int32_t *sums;         /* [2][SEGMENT_SUMS] */
} Room;

/* Whether tiles of weights are loaded from the panel itself. */
static int in_place(const QuantLinear *layer) { return layer->bits == 8 && layer->segment == padded_segment(layer); }

static size_t weights_size(const QuantLinear *layer) {
    return in_place(layer) ? 0 : (size_t)(block_segments(layer) * padded_segment(layer) * PANEL);
}

static size_t scales_size(const QuantLinear *layer) { return (size_t)layer->num_segments * PANEL * sizeof(float); }

size_t tiles_room(const QuantLinear *layer) {
    return weights_size(layer) + 2 * scales_size(layer) + 2 * SEGMENT_SUMS * sizeof(int32_t);
}

static Room divide(const QuantLinear *layer, char *memory) {
    char *scale = memory + weights_size(layer), *offset = scale + scales_size(layer);
    return (Room){(int8_t *)memory, (float *)scale, (float *)offset, (int32_t *)(offset + scales_size(layer))};
}

static inline __m512 load_half(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

static inline __m512 load_scale(const QuantLinear *layer, int64_t index) {
    if (layer->wide_scale) return _mm512_loadu_ps((const float *)layer->scale + index);
    return load_half((const uint16_t *)layer->scale + index);
}

static void widen_scales(const QuantLinear *layer, const Room *room, int64_t panel) {
    for (int64_t i = 0; i < layer->num_segments * PANEL && !layer->row_scale; i += 16) {
        int64_t index = panel * layer->num_segments * PANEL + i;
        _mm512_storeu_ps(room->scale + i, load_scale(layer, index));
        if (layer->offset) _mm512_storeu_ps(room->offset + i, load_half(layer->offset + index));
    }
}

/* Weights of some segments of a panel, less the zero point. */
static void unpack(const QuantLinear *layer, const uint8_t *from, int64_t segments, int8_t *to) {
    const int64_t segment = layer->segment, padding = (padded_segment(layer) - segment) * PANEL;
    const __m512i low = _mm512_set1_epi8(15), zero_point = _mm512_set1_epi8((char)layer->zero_point);
    for (int64_t s = 0; s < segments; s++) {
        if (layer->bits == 8) {
            memcpy(to, from, (size_t)(segment * PANEL));
            from += segment * PANEL;
            to += segment * PANEL;
        } else {
            for (int64_t i = 0; i < segment * PANEL; i += 256, from += 128, to += 256) {
                for (int half = 0; half < 128; half += 64) {
                    __m512i both = _mm512_loadu_si512(from + half);
                    __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                    _mm512_storeu_si512(to + half, _mm512_sub_epi8(_mm512_and_si512(both, low), zero_point));
                    _mm512_storeu_si512(to + half + 128, _mm512_sub_epi8(high, zero_point));
                }
            }
        }
        for (int64_t i = 0; i < padding; i += 64, to += 64) _mm512_storeu_si512(to, _mm512_setzero_si512());
    }
}

/* Memory to bring into the second-level cache. */
typedef struct {
    const char *from, *end;
    int64_t lines; /* at a time */
} Fetch;

__attribute__((always_inline)) static inline void fetch(Fetch *ahead) {
    for (int64_t i = 0; i < ahead->lines && ahead->from < ahead->end; i++, ahead->from += 64)
        _mm_prefetch(ahead->from, _MM_HINT_T1);
}

/* GCC's intrinsics do not say that they read memory. */
#define COMPILER_BARRIER() __asm__ volatile("" ::: "memory")

/* In the first step of a segment, what the tile holds of the one before is stored. */
#define STORE_AND_CLEAR(tile, to)                                                                                      \
    if (first) {                                                                                                       \
        _tile_stored(tile, to, 4 * PANEL);                                                                             \
        _tile_zero(tile);                                                                                              \
    }

#define SCALE_PART                                                                                                     \
    scale_rows(kind, old, act_stride, scaled, scaled + part < old->rows ? scaled + part : old->rows);                  \
    scaled += part;                                                                                                    \
    fetch(ahead);                                                                                                      \
    COMPILER_BARRIER();

/* Add the products of one step; meanwhile, in four parts of `part` rows from `scaled` on, scale what is old. */
__attribute__((always_inline)) static inline int add_step(const int tiles, const int kind, const int first,
                                                          int32_t *sums, int rows, const int8_t *values, int64_t stride,
                                                          const int8_t *weights, const Pending *old, int64_t act_stride,
                                                          int scaled, int part, Fetch *ahead) {
    COMPILER_BARRIER();
    _tile_stream_loadd(ACTIVATIONS_0, values, stride);
    _tile_loadd(WEIGHTS_0, weights, 4 * PANEL);
    STORE_AND_CLEAR(0, sums)
    _tile_dpbssd(0, ACTIVATIONS_0, WEIGHTS_0);
    SCALE_PART
    _tile_loadd(WEIGHTS_1, weights + 64, 4 * PANEL);
    STORE_AND_CLEAR(1, sums + 16)
    _tile_dpbssd(1, ACTIVATIONS_0, WEIGHTS_1);
    SCALE_PART
    if (tiles == 2) {
        _tile_stream_loadd(ACTIVATIONS_1, values + rows * stride, stride);
        STORE_AND_CLEAR(2, sums + rows * PANEL)
        _tile_dpbssd(2, ACTIVATIONS_1, WEIGHTS_0);
        SCALE_PART
        STORE_AND_CLEAR(3, sums + rows * PANEL + 16)
        _tile_dpbssd(3, ACTIVATIONS_1, WEIGHTS_1);
        SCALE_PART
    }
    return scaled;
}

/* With `fixed_steps` > 0, that many steps are in a segment. */
__attribute__((always_inline)) static inline void multiply(const int tiles, const int kind, const int fixed_steps,
                                                           const QuantLinear *layer, const Activations *a, int64_t rows,
                                                           int height, int64_t panel, int64_t next, char *memory,
                                                           float *totals) {
    const Room room = divide(layer, memory);
    const int64_t segment = layer->segment, segments = layer->num_segments, most = block_segments(layer);
    const int64_t step = step_of(layer), steps = fixed_steps ? fixed_steps : padded_segment(layer) / step;
    const int64_t unit = height * tiles, units = (rows + unit - 1) / unit, stride = a->stride, act_stride = a->segments;
    const int64_t segment_bytes = segment * PANEL * layer->bits / 8;
    const uint8_t *panel_weights = layer->weight + panel * segments * segment_bytes;
    const int parts = (int)(2 * tiles * steps), part = (int)((unit + parts - 1) / parts);
    /* While a segment is multiplied, the sums of the last one are stored and those of the one before that scaled. */
    Pending last = {.scale = room.scale, .offset = room.offset}, old = last;
    int32_t *sums = room.sums, *others = room.sums + SEGMENT_SUMS;
    widen_scales(layer, &room, panel);
    for (int64_t first = 0; first < segments; first += most) {
        const int64_t count = segments - first < most ? segments - first : most;
        Fetch ahead = {.lines = (count * segment_bytes / 64 + units * count * parts - 1) / (units * count * parts)};
        ahead.from = (const char *)layer->weight + (next * segments + first) * segment_bytes;
        ahead.end = next < 0 ? ahead.from : ahead.from + count * segment_bytes;
        const int8_t *block = (const int8_t *)panel_weights + first * segment_bytes;
        if (!in_place(layer)) {
            unpack(layer, panel_weights + first * segment_bytes, count, room.weights);
            block = room.weights;
        }
        for (int64_t r = 0; r < rows; r += unit) {
            const int8_t *values = a->values + r * stride + first * segment, *weights = block;
            const int here = (int)(rows - r < unit ? rows - r : unit);
            for (int64_t s = first; s < first + count; s++, values += segment) {
                int scaled = add_step(tiles, kind, 1, sums, height, values, stride, weights, &old, act_stride, 0, part,
                                      &ahead);
                weights += step * PANEL;
                for (int64_t k = 1; k < steps; k++, weights += step * PANEL)
                    scaled = add_step(tiles, kind, 0, NULL, height, values + k * step, stride, weights, &old,
                                      act_stride, scaled, part, &ahead);
                int32_t *swapped = sums;
                old = last;
                last = (Pending){.sums = others,
                                 .scale = room.scale + s * PANEL,
                                 .offset = room.offset + s * PANEL,
                                 .act_scale = a->scale + r * act_stride + s,
                                 .act_sum = a->sum + r * act_stride + s,
                                 .totals = totals + r * PANEL,
                                 .rows = here,
                                 .started = s ? (__mmask16)0xffff : 0};
                sums = others;
                others = swapped;
            }
        }
    }
    scale_rows(kind, &old, act_stride, 0, old.rows);
    _tile_stored(0, sums, 4 * PANEL);
    _tile_stored(1, sums + 16, 4 * PANEL);
    if (tiles == 2) {
        _tile_stored(2, sums + height * PANEL, 4 * PANEL);
        _tile_stored(3, sums + height * PANEL + 16, 4 * PANEL);
    }
    scale_rows(kind, &last, act_stride, 0, last.rows);
    if (kind != ROW_SCALES) return;
    for (int half = 0; half < 2; half++) {
        __m512 scale = load_scale(layer, panel * PANEL + half * 16);
        for (int64_t r = 0; r < rows; r++) {
            float *to = totals + r * PANEL + half * 16;
            _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_loadu_ps(to), scale));
        }
    }
}

#define MULTIPLY(tiles, kind, steps)                                                                                   \
    static void multiply_##tiles##_##kind##_##steps(const QuantLinear *layer, const Activations *a, int64_t rows,      \
                                                    int height, int64_t panel, int64_t next, char *memory,             \
                                                    float *totals) {                                                   \
        multiply(tiles, kind, steps, layer, a, rows, height, panel, next, memory, totals);                             \
    }
#define KINDS(tiles, steps)                                                                                            \
    MULTIPLY(tiles, SCALES, steps)                                                                                     \
    MULTIPLY(tiles, OFFSETS, steps)                                                                                    \
    MULTIPLY(tiles, ROW_SCALES, steps)
KINDS(1, 0)
KINDS(1, 1)
KINDS(1, 2)
KINDS(2, 0)
KINDS(2, 1)
KINDS(2, 2)

typedef void (*multiply_fn)(const QuantLinear *, const Activations *, int64_t, int, int64_t, int64_t, char *, float *);

#define NAMES(tiles, steps)                                                                                            \
    {multiply_##tiles##_SCALES_##steps, multiply_##tiles##_OFFSETS_##steps, multiply_##tiles##_ROW_SCALES_##steps}
static const multiply_fn MULTIPLICATIONS[2][3][3] = {{NAMES(1, 0), NAMES(1, 1), NAMES(1, 2)},
                                                     {NAMES(2, 0), NAMES(2, 1), NAMES(2, 2)}};

void multiply_panel_tiled(const QuantLinear *layer, const Activations *a, int64_t rows, TileRows shape, int64_t panel,
                          int64_t next, char *memory, float *totals) {
    const int64_t steps = padded_segment(layer) / step_of(layer);
    const int kind = layer->row_scale ? ROW_SCALES : layer->offset ? OFFSETS : SCALES;
    MULTIPLICATIONS[shape.tiles - 1][steps <= 2 ? steps : 0][kind](layer, a, rows, shape.rows, panel, next, memory,
                                                                   totals);
}

#endif
