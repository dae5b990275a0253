/* Products with matrix tiles: integer sums of 32 rows and 32 columns at a time.
 *
 * A unit of 32 rows stays in the first-level cache while weights stream by: those of a group of panels, which stay in the
 * second-level cache until all units have met them. In a row of many inputs that happens block by block, and the totals
 * of all panels of the group wait in between.
 *
 * The sums of a segment become part of the totals in three stages that run side by side: while a segment is multiplied,
 * the sums of the last one are stored, and those of the one before that scaled, a few rows between each two tile
 * instructions. Whoever reads what a store wrote a moment ago waits, and so does a tile instruction behind a long row of
 * others. */
#include "matmul_tiles.h"

#include "elementwise_vec.h"

#if HAS_TILES

enum { UNIT = 2 * TILE_ROWS };
/* int32 sums of a segment, or totals, of a unit and a panel. */
enum { SUMS = UNIT * PANEL };
/* Bytes of a row of activations in a block. */
enum { BLOCK_BYTES = 1024 };
/* Bytes of weights of a group, as they are multiplied; if one unit is all, only those that were unpacked wait. */
enum { GROUP_BYTES = 256 * 1024, UNPACKED_BYTES = 64 * 1024 };
/* Fewer rows are as fast without tiles, of weights of eight and of four bits. */
enum { FEWEST_ROWS_8 = 7, FEWEST_ROWS_4 = 13 };
/* Rows that are scaled between two tile instructions are 4, or 8 where a segment has few instructions. */
enum { MOST_SLOT = 8 };

/* Tile registers: sums of two by two tiles, two of activations, two of weights. */
#define UPPER 4
#define LOWER 5
#define LEFT 6
#define RIGHT 7

/* How sums become totals: by a scale per segment and column, by that and an offset, or by the activations' alone. */
enum { SCALES, OFFSETS, ROW_SCALES };

/* What a thread has for itself. */
typedef struct {
    int32_t *sums;         /* [2][SUMS] */
    float *totals;         /* [SUMS] for every panel of a stripe, or for every unit and panel of a group */
    int8_t *weights;       /* [panels of a group][2][bytes of a block * 16], as in a panel, segments padded with zeros */
    float *scale, *offset; /* [panels of a group][segments of a block][PANEL], or [panels of a group][PANEL] */
} Room;

/* A block of a group. */
typedef struct {
    const TiledProduct *p;
    Room room;
    int64_t stripe, panels, end; /* first stripe, panels of the group, and the stripe that no one fetches any more */
    int64_t segment, segments;   /* first one, and how many */
} Block;

/* Sums of a segment that were stored, or will be, and wait for being scaled. */
typedef struct {
    const int32_t *sums;
    const float *act_scale, *act_sum; /* of the first row */
    const float *scale, *offset;      /* [PANEL] */
    float *totals, *gates;            /* gates: if the totals are what is multiplied with them */
    int64_t rows;                     /* to be scaled: 0 or a multiple of MOST_SLOT */
    int64_t ends;                     /* whether totals are complete with it */
    int64_t row, stripe, part;        /* of the product */
} Pending;

/* ---------------------------------------------------------------------- sizes */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes of a row of activations that a tile holds: whole segments if they are short, since more would only be
 * multiplied with zeros. */
static int64_t step_of(const QuantLinear *layer) { return least(layer->segment, TILE_BYTES); }

static int64_t padded_segment(const QuantLinear *layer) { return round_up(layer->segment, step_of(layer)); }

/* Whether tiles of weights are loaded from the panel itself. */
static int in_place(const QuantLinear *layer) { return layer->bits == 8 && layer->segment == padded_segment(layer); }

static int64_t units_of(const TiledProduct *p) { return (p->rows + UNIT - 1) / UNIT; }

static int64_t block_segments(const TiledProduct *p) {
    const int64_t segments = p->layer->num_segments, padded = padded_segment(p->layer);
    if (units_of(p) == 1 && in_place(p->layer)) return segments; /* weights are read once, whatever the order */
    const int64_t most = BLOCK_BYTES / padded ? BLOCK_BYTES / padded : 1, blocks = (segments + most - 1) / most;
    return (segments + blocks - 1) / blocks;
}

static int64_t block_bytes(const TiledProduct *p) { return block_segments(p) * padded_segment(p->layer); }

static int64_t totals_of(const TiledProduct *p, int64_t panels) {
    return block_segments(p) == p->layer->num_segments ? p->panels : units_of(p) * panels;
}

static size_t sizes(const TiledProduct *p, size_t *sums, size_t *totals, size_t *weights, size_t *scale) {
    const int64_t panels = p->group * p->panels;
    *sums = 2 * SUMS * sizeof(int32_t);
    *totals = (size_t)(totals_of(p, panels) * SUMS) * sizeof(float);
    *weights = in_place(p->layer) ? 0 : (size_t)(panels * block_bytes(p) * PANEL);
    *scale = (size_t)(panels * (p->layer->row_scale ? 1 : block_segments(p)) * PANEL) * sizeof(float);
    return *sums + *totals + *weights + (p->layer->offset ? 2 : 1) * *scale;
}

size_t tiles_room(const TiledProduct *p) {
    size_t sums, totals, weights, scale;
    return sizes(p, &sums, &totals, &weights, &scale);
}

static Room divide(const TiledProduct *p, char *memory) {
    size_t sums, totals, weights, scale;
    sizes(p, &sums, &totals, &weights, &scale);
    Room room = {.sums = (int32_t *)memory};
    room.totals = (float *)(memory += sums);
    room.weights = (int8_t *)(memory += totals);
    room.scale = (float *)(memory += weights);
    room.offset = (float *)(memory + scale);
    return room;
}

void begin_tiles(const TiledProduct *p, char *memory) {
    const Room room = divide(p, memory);
    memset(room.totals, 0, (size_t)((const char *)room.weights - (const char *)room.totals));
}

int tiles_suit(const QuantLinear *layer, int64_t rows) {
    if (layer->bits == 8) return rows >= FEWEST_ROWS_8 && layer->zero_point == 128;
    return rows >= FEWEST_ROWS_4 && layer->zero_point >= 0 && layer->zero_point <= 128;
}

void lay_out_for_tiles(const QuantLinear *layer, Activations *a) {
    a->unit = UNIT;
    a->step = step_of(layer);
    a->padded = padded_segment(layer);
    a->stride = a->padded * layer->num_segments;
}

int64_t tiles_group(const TiledProduct *p, int num_threads) {
    /* One unit gains nothing by groups; what is taken at a time is little, so that threads end together. */
    const int64_t fair = (p->stripes + num_threads - 1) / num_threads, few = fair / 8 + 1;
    if (units_of(p) == 1 && in_place(p->layer)) return few;
    const int64_t bytes = units_of(p) == 1 ? UNPACKED_BYTES : GROUP_BYTES, most = bytes / (p->panels * block_bytes(p) * PANEL);
    if (most < 2) return 1;
    if (units_of(p) == 1) return least(most, few);
    const int64_t groups = (fair + most - 1) / most;
    return (fair + groups - 1) / groups;
}

/* ---------------------------------------------------------------------- weights */

static int64_t panel_of(const Block *b, int64_t slot) {
    return slot % b->p->panels * b->p->stripes + b->stripe + slot / b->p->panels;
}

/* Bytes of a segment, and of all of them, in half a panel. */
static int64_t half_segment(const QuantLinear *layer) { return layer->segment * PANEL / 2 * layer->bits / 8; }

static const uint8_t *half_panel(const QuantLinear *layer, int64_t panel, int half, int64_t segment) {
    return layer->weight + ((panel * 2 + half) * layer->num_segments + segment) * half_segment(layer);
}

/* Weights of some segments of half a panel, less the zero point. */
static void unpack(const QuantLinear *layer, const uint8_t *from, int64_t segments, int8_t *to) {
    const int64_t bytes = layer->segment * PANEL / 2, padding = padded_segment(layer) * PANEL / 2 - bytes;
    const __m512i low = _mm512_set1_epi8(15), zero_point = _mm512_set1_epi8((char)layer->zero_point);
    for (int64_t s = 0; s < segments; s++) {
        if (layer->bits == 8) {
            memcpy(to, from, (size_t)bytes);
            from += bytes;
            to += bytes;
        } else {
            for (int64_t i = 0; i < bytes; i += 128, from += 64, to += 128) {
                const __m512i both = _mm512_loadu_si512(from);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                _mm512_storeu_si512(to, _mm512_sub_epi8(_mm512_and_si512(both, low), zero_point));
                _mm512_storeu_si512(to + 64, _mm512_sub_epi8(high, zero_point));
            }
        }
        for (int64_t i = 0; i < padding; i += 64, to += 64) _mm512_storeu_si512(to, _mm512_setzero_si512());
    }
}

static void prepare(const Block *b) {
    const QuantLinear *layer = b->p->layer;
    const int64_t half = b->segments * padded_segment(layer) * PANEL / 2;
    for (int64_t slot = 0; slot < b->panels; slot++) {
        const int64_t panel = panel_of(b, slot);
        for (int side = 0; side < 2 && !in_place(layer); side++)
            unpack(layer, half_panel(layer, panel, side, b->segment), b->segments,
                   b->room.weights + (slot * 2 + side) * half);
        const int64_t scales = (layer->row_scale ? 1 : b->segments) * PANEL;
        const int64_t from = layer->row_scale ? panel * PANEL : (panel * layer->num_segments + b->segment) * PANEL;
        for (int64_t i = 0; i < scales; i += 16) {
            _mm512_storeu_ps(b->room.scale + slot * scales + i, load_scale(layer, from + i));
            if (layer->offset) _mm512_storeu_ps(b->room.offset + slot * scales + i, load_half(layer->offset + from + i));
        }
    }
}

/* Two pieces of memory to bring into the second-level cache. */
typedef struct {
    const char *left, *right;
    int64_t lines; /* of each at a time */
} Fetch;

INLINE void fetch(Fetch *ahead) {
    for (int64_t i = 0; i < ahead->lines; i++) {
        _mm_prefetch(ahead->left, _MM_HINT_T1);
        _mm_prefetch(ahead->right, _MM_HINT_T1);
        ahead->left += 64, ahead->right += 64;
    }
}

/* What to fetch while unit `unit` meets a panel: of one unit the panel after it; of several a part of what comes when all
 * have met this block. */
static Fetch fetch_for(const Block *b, int64_t slot, int64_t unit, int64_t steps) {
    const TiledProduct *p = b->p;
    const QuantLinear *layer = p->layer;
    const int64_t units = units_of(p), next = b->segment + b->segments;
    Block then = *b;
    if (units == 1 && next == layer->num_segments) slot++;
    if (next == layer->num_segments) then.segment = 0, then.stripe += units == 1 ? 0 : b->panels / p->panels;
    else then.segment = next;
    if (then.stripe + slot / p->panels >= b->end) return (Fetch){.lines = 0};
    const int64_t lines = half_segment(layer) * b->segments / 64, each = (lines + units * steps - 1) / (units * steps);
    const char *from = (const char *)half_panel(layer, panel_of(&then, slot), 0, then.segment) + unit * each * steps * 64;
    return (Fetch){from, from + layer->num_segments * half_segment(layer), each};
}

/* ---------------------------------------------------------------------- totals */

/* Rows [begin, begin + rows) are complete: store them, or leave a gate to what it is multiplied with. */
INLINE void finish(const TiledProduct *p, const Pending *done, int64_t begin, const int most) {
    const QuantLinear *layer = p->layer;
    float *totals = done->totals + begin * PANEL, *gates = done->gates ? done->gates + begin * PANEL : totals;
    const int64_t rows = least(most, p->rows - done->row - begin);
    if (rows <= 0 || (p->panels == 2 && gates == totals)) return;
    p->store(layer, gates, totals, (done->row + begin) / layer->planes, rows / layer->planes, done->stripe, p->out);
    /* The next ones begin with nothing. */
#pragma GCC unroll 8
    for (int i = 0; i < most * PANEL; i += 16) {
        _mm512_storeu_ps(totals + i, _mm512_setzero_ps());
        _mm512_storeu_ps(gates + i, _mm512_setzero_ps());
    }
}

/* Add the sums of some rows to the totals, with the operations of the other kernels and in their order, so that results
 * are the same to the bit. `ends`: the totals are complete then, and get the scales of their columns. */
INLINE void add_sums(const int kind, const int rows, const int ends, const Pending *old, int64_t begin) {
    const int32_t *sums = old->sums + begin * PANEL;
    float *totals = old->totals + begin * PANEL;
    const float *act_scale = old->act_scale + begin, *act_sum = old->act_sum + begin;
    __m512 scale[2], offset[2];
    for (int half = 0; half < 2 && (kind != ROW_SCALES || ends); half++) {
        scale[half] = _mm512_loadu_ps(old->scale + half * 16);
        if (kind == OFFSETS) offset[half] = _mm512_loadu_ps(old->offset + half * 16);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m512 of_row = _mm512_set1_ps(act_scale[r]);
        for (int half = 0; half < 2; half++) {
            float *to = totals + r * PANEL + half * 16;
            __m512 total = _mm512_loadu_ps(to);
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + r * PANEL + half * 16));
            if (kind == ROW_SCALES) total = _mm512_fmadd_ps(sum, of_row, total);
            else total = _mm512_fmadd_ps(_mm512_mul_ps(sum, of_row), scale[half], total);
            if (kind == OFFSETS) total = _mm512_fmadd_ps(_mm512_set1_ps(act_sum[r]), offset[half], total);
            if (kind == ROW_SCALES && ends) total = _mm512_mul_ps(total, scale[half]);
            _mm512_storeu_ps(to, total);
        }
    }
}

INLINE void scale_rows(const int kind, const int rows, const TiledProduct *p, const Pending *old, int64_t begin) {
    if (begin >= old->rows) return;
    if (!old->ends) {
        add_sums(kind, rows, 0, old, begin);
    } else {
        add_sums(kind, rows, 1, old, begin);
        finish(p, old, begin, rows);
    }
}

/* ---------------------------------------------------------------------- products */

/* GCC's intrinsics do not say that they read memory. */
#define COMPILER_BARRIER() __asm__ volatile("" ::: "memory")

/* In the first step of a segment, what the tile holds of the one before is stored. */
#define MULTIPLY(tile, at, left, right)                                                                                \
    if (first) {                                                                                                       \
        _tile_stored(tile, sums + (at), 4 * PANEL);                                                                    \
        _tile_zero(tile);                                                                                              \
    }                                                                                                                  \
    _tile_dpbssd(tile, left, right);                                                                                   \
    if (slot) scale_rows(kind, slot, p, old, begin), begin += slot;                                                    \
    COMPILER_BARRIER();

/* Add the products of one step; meanwhile scale `slot` rows of what is old, from `begin` on, after each instruction. */
INLINE void add_step(const int tiles, const int kind, const int first, const int slot, const TiledProduct *p,
                     int32_t *sums, const int8_t *values, int64_t step, const int8_t *weights, int64_t half,
                     const Pending *old, int64_t begin, Fetch *ahead) {
    COMPILER_BARRIER();
    _tile_loadd(UPPER, values, step);
    _tile_stream_loadd(LEFT, weights, 64);
    MULTIPLY(0, 0, UPPER, LEFT)
    _tile_stream_loadd(RIGHT, weights + half, 64);
    MULTIPLY(1, 16, UPPER, RIGHT)
    if (tiles == 2) {
        _tile_loadd(LOWER, values + TILE_ROWS * step, step);
        MULTIPLY(2, TILE_ROWS * PANEL, LOWER, LEFT)
        MULTIPLY(3, TILE_ROWS * PANEL + 16, LOWER, RIGHT)
    }
    fetch(ahead);
}

/* All steps of a segment; `one`: there is no second. */
INLINE void add_segment(const int tiles, const int kind, const int one, const TiledProduct *p, int32_t *sums,
                        const int8_t *values, int64_t step, const int8_t *weights, int64_t half, int64_t steps,
                        const Pending *old, Fetch *ahead) {
    add_step(tiles, kind, 1, one ? MOST_SLOT : MOST_SLOT / 2, p, sums, values, step, weights, half, old, 0, ahead);
    if (one) return;
    values += UNIT * step, weights += TILE_ROWS * 64;
    add_step(tiles, kind, 0, MOST_SLOT / 2, p, NULL, values, step, weights, half, old, tiles * MOST_SLOT, ahead);
    for (int64_t k = 2; k < steps; k++) {
        values += UNIT * step, weights += TILE_ROWS * 64;
        add_step(tiles, kind, 0, 0, p, NULL, values, step, weights, half, old, 0, ahead);
    }
}

/* One unit, over a block of a group. */
INLINE void run_unit(const int tiles, const int kind, const int one, const Block *b, int64_t unit) {
    const TiledProduct *p = b->p;
    const QuantLinear *layer = p->layer;
    const Activations *a = p->a;
    const int direct = in_place(layer);
    const int64_t step = a->step, steps = a->padded / step, row = unit * UNIT, rows = least(p->rows - row, UNIT);
    const int64_t half = (direct ? layer->num_segments : b->segments) * a->padded * PANEL / 2;
    const int64_t apart = b->segments < layer->num_segments, last_segment = layer->num_segments - 1;
    int32_t *sums = b->room.sums, *others = sums + SUMS;
    Pending ring[3] = {{.rows = 0}, {.rows = 0}, {.rows = 0}};
    Pending *old = &ring[0], *last = &ring[1], *next = &ring[2];
    for (int64_t slot = 0; slot < b->panels; slot++) {
        const int64_t part = slot % p->panels, stripe = b->stripe + slot / p->panels;
        const int8_t *weights = direct ? (const int8_t *)half_panel(layer, panel_of(b, slot), 0, b->segment)
                                       : b->room.weights + slot * 2 * half;
        const int8_t *values = a->values + row * a->stride + b->segment * a->padded * UNIT;
        float *totals = b->room.totals + (apart ? unit * b->panels + slot : part) * SUMS;
        Fetch ahead = fetch_for(b, slot, unit, b->segments * steps);
        for (int64_t s = b->segment; s < b->segment + b->segments; s++) {
            add_segment(tiles, kind, one, p, sums, values, step, weights, half, steps, old, &ahead);
            values += a->padded * UNIT, weights += a->padded * PANEL / 2;
            const int64_t of_row = row * a->segments + s * UNIT;
            const int64_t of_column = kind == ROW_SCALES ? slot * PANEL : (slot * b->segments + s - b->segment) * PANEL;
            next->sums = others;
            next->act_scale = a->scale + of_row, next->act_sum = a->sum + of_row;
            next->scale = b->room.scale + of_column, next->offset = b->room.offset + of_column;
            next->totals = totals, next->gates = part ? totals - SUMS : NULL;
            next->rows = round_up(rows, MOST_SLOT), next->ends = s == last_segment;
            next->row = row, next->stripe = stripe, next->part = part;
            Pending *done = old;
            old = last, last = next, next = done;
            int32_t *stored = sums;
            sums = others, others = stored;
        }
    }
    for (int64_t r = 0; r < UNIT; r += MOST_SLOT) scale_rows(kind, MOST_SLOT, p, old, r);
    _tile_stored(0, sums, 4 * PANEL);
    _tile_stored(1, sums + 16, 4 * PANEL);
    if (tiles == 2) {
        _tile_stored(2, sums + TILE_ROWS * PANEL, 4 * PANEL);
        _tile_stored(3, sums + TILE_ROWS * PANEL + 16, 4 * PANEL);
    }
    for (int64_t r = 0; r < UNIT; r += MOST_SLOT) scale_rows(kind, MOST_SLOT, p, last, r);
}

#define RUN(tiles, kind, one)                                                                                          \
    static void run_##tiles##_##kind##_##one(const Block *b, int64_t unit) { run_unit(tiles, kind, one, b, unit); }
#define RUNS(tiles) RUN(tiles, SCALES, 0) RUN(tiles, SCALES, 1) RUN(tiles, OFFSETS, 0) RUN(tiles, OFFSETS, 1)          \
    RUN(tiles, ROW_SCALES, 0) RUN(tiles, ROW_SCALES, 1)
RUNS(1)
RUNS(2)

typedef void (*run_fn)(const Block *, int64_t);

#define NAMES(tiles)                                                                                                   \
    {{run_##tiles##_SCALES_0, run_##tiles##_SCALES_1},                                                                 \
     {run_##tiles##_OFFSETS_0, run_##tiles##_OFFSETS_1},                                                               \
     {run_##tiles##_ROW_SCALES_0, run_##tiles##_ROW_SCALES_1}}
static const run_fn RUN_UNIT[2][3][2] = {NAMES(1), NAMES(2)};

static void configure(const QuantLinear *layer, int64_t rows) {
    tile_shapes_t shapes = {0};
    const int step = (int)step_of(layer), upper = (int)least(rows, TILE_ROWS), lower = (int)rows - upper;
    for (int side = 0; side < 2; side++) {
        shape_tile(&shapes, side, upper, TILE_BYTES);
        if (lower) shape_tile(&shapes, 2 + side, lower, TILE_BYTES);
        shape_tile(&shapes, LEFT + side, step / 4, TILE_BYTES);
    }
    shape_tile(&shapes, UPPER, upper, step);
    if (lower) shape_tile(&shapes, LOWER, lower, step);
    use_shapes(&shapes);
}

void multiply_tiled(const TiledProduct *p, int64_t first, int64_t count, int64_t end, char *memory, int64_t *height) {
    const QuantLinear *layer = p->layer;
    const int kind = layer->row_scale ? ROW_SCALES : layer->offset ? OFFSETS : SCALES;
    const int one = padded_segment(layer) == step_of(layer);
    Block b = {.p = p, .room = divide(p, memory), .stripe = first, .panels = count * p->panels, .end = end};
    for (int64_t segment = 0; segment < layer->num_segments; segment += b.segments) {
        b.segment = segment;
        b.segments = least(block_segments(p), layer->num_segments - segment);
        prepare(&b);
        for (int64_t unit = 0; unit < units_of(p); unit++) {
            const int64_t rows = least(p->rows - unit * UNIT, UNIT);
            if (rows != *height) configure(layer, rows);
            *height = rows;
            RUN_UNIT[rows > TILE_ROWS][kind][one](&b, unit);
        }
    }
}

void end_tiles(void) { _tile_release(); }

#endif
