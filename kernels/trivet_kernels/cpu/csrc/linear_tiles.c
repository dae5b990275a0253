/* Products of bfloat16 rows with a packed bfloat16 matrix, by matrix tiles.
 *
 * The matrix is packed in panels of 32 outputs. A panel is one stream of memory: for every 32 inputs (a step) two tiles,
 * 16 outputs each, of 16 pairs of inputs (see tiles.h). Outputs and inputs beyond the matrix are zeros.
 *
 * Up to 32 rows are multiplied where they are; a panel is read once, as fast as memory gives. More rows are arranged in
 * tiles first, and pass over a stretch of a panel that stays in the first-level cache, block by block, while the next
 * stretch is fetched; their sums wait in memory between stretches. Either way an output is the sum of its products in
 * the order of the inputs, in float32, whatever the number of rows or threads, and rounded once, after the bias was
 * added. */
#include "block.h"
#include "scratch.h"
#include "shares.h"
#include "tiles.h"

int64_t trivet_has_tiles(void) { return HAS_TILES; }

#if HAS_TILES
#include "elementwise_vec.h"

#include <omp.h>

/* BLOCK rows or columns are two tiles; STEP inputs are a row of a tile. */
enum { BLOCK = 2 * TILE_ROWS, STEP = 32, TILE_SIZE = TILE_ROWS * TILE_BYTES };
/* Bytes of a panel, and of a block of arranged rows, that a step reads; and those of a block's sums. */
enum { STEP_BYTES = 2 * TILE_SIZE, SUMS_BYTES = 4 * TILE_SIZE };
/* How far in front of the weights that are multiplied others are fetched. */
enum { AHEAD = 8 * STEP_BYTES };
/* Steps of a stretch, at most: its weights and a block's sums stay in 48 KiB, which rows stream through. With few blocks
 * of rows the next one is wanted soon, and shorter ones are faster; all found by measurement. */
enum { STRETCH = 16, SHORT_STRETCH = 8, SHORTEST_STRETCH = 5 };
/* Bytes of arranged rows, and of waiting sums, that should stay in the second-level cache. */
enum { MOST_ROWS = 1 << 20, MOST_SUMS = 1 << 20 };
/* Rows that are multiplied at once: more would neither stay in it, nor gain by reading weights less often. */
enum { MOST_AT_ONCE = 512 };

/* A packed matrix; TiledMatrix of tiles.py. */
typedef struct {
    const char *weight;
    const bf16_t *bias; /* [outputs] or NULL */
    int64_t inputs, outputs;
} layer_t;

typedef struct {
    const char *x; /* rows, `x_stride` bytes apart, or blocks of arranged ones */
    int64_t x_stride;
    const char *weight;
    const bf16_t *bias; /* [outputs] or NULL */
    bf16_t *out;
    int64_t out_stride, rows, outputs;
    int64_t steps;  /* of a panel */
    int64_t gate;   /* the activation, or NO_GATE */
    int64_t second; /* panels between a gate and what it is multiplied with */
} product_t;

/* ---------------------------------------------------------------------- tiles */

/* Sums are in tiles 0 to 3, rows in 4 and 5, weights in 6 and 7. */
static void configure(int64_t rows) {
    tile_shapes_t shapes = {0};
    const int upper = rows < TILE_ROWS ? (int)rows : TILE_ROWS, lower = (int)rows - upper;
    for (int tile = 0; tile < 2; tile++) {
        shape_tile(&shapes, tile, upper, TILE_BYTES);
        if (lower) shape_tile(&shapes, 2 + tile, lower, TILE_BYTES);
        shape_tile(&shapes, 6 + tile, TILE_ROWS, TILE_BYTES);
    }
    shape_tile(&shapes, 4, upper, TILE_BYTES);
    if (lower) shape_tile(&shapes, 5, lower, TILE_BYTES);
    use_shapes(&shapes);
}

INLINE void clear_sums(const int tall) {
    _tile_zero(0);
    _tile_zero(1);
    if (!tall) return;
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void load_sums(const int tall, const char *sums) {
    _tile_loadd(0, sums, TILE_BYTES);
    _tile_loadd(1, sums + TILE_SIZE, TILE_BYTES);
    if (!tall) return;
    _tile_loadd(2, sums + 2 * TILE_SIZE, TILE_BYTES);
    _tile_loadd(3, sums + 3 * TILE_SIZE, TILE_BYTES);
}

INLINE void store_sums(const int tall, char *sums) {
    _tile_stored(0, sums, TILE_BYTES);
    _tile_stored(1, sums + TILE_SIZE, TILE_BYTES);
    if (!tall) return;
    _tile_stored(2, sums + 2 * TILE_SIZE, TILE_BYTES);
    _tile_stored(3, sums + 3 * TILE_SIZE, TILE_BYTES);
}

/* Add the products of rows where they are (`tall`: more than TILE_ROWS) with a panel. */
INLINE void add_rows(const int tall, const char *x, int64_t stride, const char *panel, int64_t steps) {
    const char *below = x + TILE_ROWS * stride;
    for (int64_t i = 0; i < steps; i++, panel += STEP_BYTES, x += TILE_BYTES, below += TILE_BYTES) {
        for (int line = 0; line < STEP_BYTES; line += 64) _mm_prefetch(panel + AHEAD + line, _MM_HINT_T1);
        _tile_loadd(4, x, stride);
        _tile_loadd(6, panel, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + TILE_SIZE, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (!tall) continue;
        _tile_loadd(5, below, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* Add those of a block of arranged rows with a stretch of a panel; `lines` from `ahead` on are fetched in a step. Rows
 * are loaded so that they do not drive the weights out of the first-level cache. */
INLINE void add_arranged(const int tall, const int lines, const char *x, const char *panel, int64_t steps,
                         const char *ahead) {
    for (int64_t i = 0; i < steps; i++, panel += STEP_BYTES, x += STEP_BYTES, ahead += 64 * lines) {
        for (int line = 0; line < lines; line++) _mm_prefetch(ahead + 64 * line, _MM_HINT_T1);
        _tile_stream_loadd(4, x, TILE_BYTES);
        _tile_loadd(6, panel, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + TILE_SIZE, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (!tall) continue;
        _tile_stream_loadd(5, x + TILE_SIZE, TILE_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* ---------------------------------------------------------------------- results */

INLINE __m512 widened(__mmask16 mask, const bf16_t *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

INLINE __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

/* Row `row` of the tile that has columns 16 * half … of a block's sums. */
INLINE __m512 sums_of(const char *sums, int64_t row, int half) {
    return _mm512_loadu_ps(sums + (row / TILE_ROWS * 2 + half) * TILE_SIZE + row % TILE_ROWS * TILE_BYTES);
}

static void store_plain(const product_t *p, int64_t row, int64_t rows, int64_t column, const char *sums) {
    for (int half = 0; half < 2; half++, column += 16) {
        const __mmask16 mask = first_lanes(p->outputs - column);
        const __m512 bias = p->bias ? widened(mask, p->bias + column) : _mm512_setzero_ps();
        bf16_t *out = p->out + row * p->out_stride + column;
        for (int64_t r = 0; r < rows; r++, out += p->out_stride) {
            const __m512 value = _mm512_add_ps(sums_of(sums, r, half), bias);
            _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(value));
        }
    }
}

/* As a gated activation of stored results would be: what goes into it is rounded first. */
INLINE void store_gated(const product_t *p, int64_t row, int64_t rows, int64_t column, const char *gates,
                        const char *ups, const int kind) {
    for (int half = 0; half < 2; half++, column += 16) {
        const bf16_t *bias = p->bias ? p->bias + column : NULL;
        const __m512 gate_bias = bias ? widened(0xffff, bias) : _mm512_setzero_ps();
        const __m512 up_bias = bias ? widened(0xffff, bias + p->outputs / 2) : _mm512_setzero_ps();
        bf16_t *out = p->out + row * p->out_stride + column;
        for (int64_t r = 0; r < rows; r++, out += p->out_stride) {
            const vec_t gate = widen_bf16(round_to_bf16((vec_t)_mm512_add_ps(sums_of(gates, r, half), gate_bias)));
            const vec_t up = widen_bf16(round_to_bf16((vec_t)_mm512_add_ps(sums_of(ups, r, half), up_bias)));
            const vec_t active = kind == SILU        ? vec_silu(gate)
                                 : kind == GELU_TANH ? vec_gelu_tanh(gate)
                                                     : vec_gelu_erf(gate);
            store(out, 0, active * up, TRIVET_BF16);
        }
    }
}

static void store_block(const product_t *p, int64_t row, int64_t rows, int64_t panel, const char *sums,
                        const char *ups) {
    const int64_t column = panel * BLOCK;
    if (p->gate == NO_GATE) store_plain(p, row, rows, column, sums);
    else if (p->gate == SILU) store_gated(p, row, rows, column, sums, ups, SILU);
    else if (p->gate == GELU_TANH) store_gated(p, row, rows, column, sums, ups, GELU_TANH);
    else store_gated(p, row, rows, column, sums, ups, GELU_ERF);
}

/* ---------------------------------------------------------------------- up to a block of rows */

static void run_few(const product_t *p, int64_t first, int64_t last) {
    char sums[2][SUMS_BYTES] __attribute__((aligned(64)));
    const int64_t bytes = p->steps * STEP_BYTES;
    const int parts = p->gate == NO_GATE ? 1 : 2, tall = p->rows > TILE_ROWS;
    for (int64_t i = first; i < last; i++) {
        for (int part = 0; part < parts; part++) {
            const char *panel = p->weight + (i + part * p->second) * bytes;
            clear_sums(tall);
            if (tall) add_rows(1, p->x, p->x_stride, panel, p->steps);
            else add_rows(0, p->x, p->x_stride, panel, p->steps);
            store_sums(tall, sums[part]);
        }
        store_block(p, 0, p->rows, i, sums[0], sums[1]);
    }
}

/* ---------------------------------------------------------------------- more rows */

/* Lay the rows of a block out as their tiles are loaded; rows beyond the last are zeros. */
static void arrange(const bf16_t *x, int64_t stride, int64_t rows, int64_t inputs, char *to) {
    const int64_t whole = inputs / STEP, steps = (inputs + STEP - 1) / STEP;
    for (int64_t r = 0; r < BLOCK; r++) {
        char *at = to + r / TILE_ROWS * TILE_SIZE + r % TILE_ROWS * TILE_BYTES;
        const bf16_t *row = x + r * stride;
        if (r >= rows) {
            for (int64_t i = 0; i < steps; i++) _mm512_store_si512(at + i * STEP_BYTES, _mm512_setzero_si512());
            continue;
        }
        for (int64_t i = 0; i < whole; i++) _mm512_store_si512(at + i * STEP_BYTES, _mm512_loadu_si512(row + i * STEP));
        if (whole < steps) {
            const __mmask32 mask = (__mmask32)((1u << (inputs - whole * STEP)) - 1);
            _mm512_store_si512(at + whole * STEP_BYTES, _mm512_maskz_loadu_epi16(mask, row + whole * STEP));
        }
    }
}

/* One block of rows over a stretch. */
INLINE void run_stretch(const int tall, const int fresh, int64_t lines, const char *x, const char *panel, int64_t steps,
                        const char *ahead, char *sums) {
    if (fresh) clear_sums(tall);
    else load_sums(tall, sums);
    /* 2 lines are fetched in a step with 512 rows, 4 with 256. */
    if (lines <= 2) add_arranged(tall, 2, x, panel, steps, ahead);
    else if (lines <= 4) add_arranged(tall, 4, x, panel, steps, ahead);
    else if (lines <= 8) add_arranged(tall, 8, x, panel, steps, ahead);
    else add_arranged(tall, 16, x, panel, steps, ahead);
    store_sums(tall, sums);
}

/* All rows over steps [begin, end) of one panel. `sums` has room for every block of rows. */
static void run_panel(const product_t *p, const char *panel, int64_t begin, int64_t end, char *sums) {
    const int64_t blocks = (p->rows + BLOCK - 1) / BLOCK, bytes = p->steps * STEP_BYTES;
    const int64_t longest = blocks > 5 ? STRETCH : blocks > 2 ? SHORT_STRETCH : SHORTEST_STRETCH;
    const int64_t stretches = (end - begin + longest - 1) / longest, each = (end - begin + stretches - 1) / stretches;
    const int64_t lines = (STEP_BYTES / 64 + blocks - 1) / blocks;
    for (int64_t step = begin; step < end; step += each) {
        const int64_t steps = end - step < each ? end - step : each;
        /* After the last stretch comes the same part of the next panel. */
        const char *ahead = panel + (step + each < end ? step + each : begin + p->steps) * STEP_BYTES;
        for (int64_t b = 0; b < blocks; b++, ahead += lines * steps * 64) {
            const char *x = p->x + b * bytes + step * STEP_BYTES, *weights = panel + step * STEP_BYTES;
            const int tall = p->rows - b * BLOCK > TILE_ROWS;
            char *block = sums + b * SUMS_BYTES;
            if (tall && step) run_stretch(1, 0, lines, x, weights, steps, ahead, block);
            else if (tall) run_stretch(1, 1, lines, x, weights, steps, ahead, block);
            else if (step) run_stretch(0, 0, lines, x, weights, steps, ahead, block);
            else run_stretch(0, 1, lines, x, weights, steps, ahead, block);
        }
    }
}

/* Steps that all rows take over every panel before they go on to the next ones: as many as leave the rows in the
 * second-level cache. */
static int64_t pass_of(const product_t *p) {
    const int64_t blocks = (p->rows + BLOCK - 1) / BLOCK, most = MOST_ROWS / (blocks * STEP_BYTES);
    if (p->steps <= most) return p->steps;
    const int64_t stretches = most / STRETCH ? most / STRETCH : 1;
    const int64_t passes = (p->steps + stretches * STRETCH - 1) / (stretches * STRETCH);
    return (p->steps + passes - 1) / passes;
}

static void run_many(const product_t *p, int64_t first, int64_t last, char *sums) {
    const int64_t bytes = p->steps * STEP_BYTES, pass = pass_of(p), blocks = (p->rows + BLOCK - 1) / BLOCK;
    const int parts = p->gate == NO_GATE ? 1 : 2;
    for (int64_t begin = 0; begin < p->steps; begin += pass) {
        const int64_t end = begin + pass < p->steps ? begin + pass : p->steps;
        for (int64_t i = first; i < last; i++) {
            char *mine = pass < p->steps ? sums + (i - first) * parts * blocks * SUMS_BYTES : sums;
            for (int part = 0; part < parts; part++)
                run_panel(p, p->weight + (i + part * p->second) * bytes, begin, end, mine + part * blocks * SUMS_BYTES);
            if (end < p->steps) continue;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t left = p->rows - b * BLOCK;
                store_block(p, b * BLOCK, left < BLOCK ? left : BLOCK, i, mine + b * SUMS_BYTES,
                            mine + (blocks + b) * SUMS_BYTES);
            }
        }
    }
}

/* ---------------------------------------------------------------------- threads */

/* A multiply_function of block.h, for bfloat16: out [rows, outputs] = x [rows, inputs] @ weight + bias, or what `gate` makes
 * of that, for which outputs is a multiple of 2 * BLOCK. */
int64_t trivet_tiles_multiply(const void *matrix, const void *rows_x, int64_t x_stride, int64_t rows, void *out,
                              int64_t out_stride, int64_t gate, int64_t dtype, int64_t num_threads) {
    if (!rows) return 0;
    if (rows > MOST_AT_ONCE) {
        const int64_t pieces = (rows + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
        const int64_t each = ((rows + pieces - 1) / pieces + BLOCK - 1) / BLOCK * BLOCK;
        for (int64_t row = 0; row < rows; row += each)
            if (trivet_tiles_multiply(matrix, (const bf16_t *)rows_x + row * x_stride, x_stride,
                                      rows - row < each ? rows - row : each, (bf16_t *)out + row * out_stride,
                                      out_stride, gate, dtype, num_threads))
                return -1;
        return 0;
    }
    const layer_t *layer = matrix;
    const bf16_t *x = rows_x;
    const int64_t inputs = layer->inputs, outputs = layer->outputs;
    product_t p = {rows_x, 2 * x_stride, layer->weight, layer->bias, out, out_stride, rows, outputs,
                   (inputs + STEP - 1) / STEP, gate, gate == NO_GATE ? 0 : outputs / 2 / BLOCK};
    const int64_t parts = gate == NO_GATE ? 1 : 2, panels = (outputs / parts + BLOCK - 1) / BLOCK;
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK, block_bytes = p.steps * STEP_BYTES;
    const int few = rows <= BLOCK, arranged = !few, padded = few && inputs % STEP;
    /* Panels that are taken at once, and how many of them have sums that wait. */
    int64_t most = panels / (8 * num_threads) + 1, waiting = 1;
    const int64_t sums_bytes = parts * blocks * SUMS_BYTES;
    if (arranged && pass_of(&p) < p.steps) {
        const int64_t fair = (panels + num_threads - 1) / num_threads, room = MOST_SUMS / sums_bytes;
        most = waiting = room < 1 ? 1 : room < fair ? room : fair;
    }
    const size_t x_bytes = arranged ? (size_t)(blocks * block_bytes) : padded ? (size_t)(rows * p.steps * STEP * 2) : 0;
    char *memory = NULL;
    if (x_bytes && !(memory = trivet_scratch(SCRATCH_ARRANGED, x_bytes))) return -1;
    share_t shares[num_threads];
    divide_shares(shares, num_threads, panels);
    int failed = 0;
    if (memory) p.x = memory;
    if (padded) {
        p.x_stride = p.steps * STEP * 2;
        for (int64_t r = 0; r < rows; r++) {
            memcpy(memory + r * p.x_stride, x + r * x_stride, (size_t)inputs * 2);
            memset(memory + r * p.x_stride + inputs * 2, 0, (size_t)(p.x_stride - inputs * 2));
        }
    }
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        char *sums = NULL;
        if (arranged) {
#pragma omp for schedule(static)
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t left = rows - b * BLOCK;
                arrange(x + b * BLOCK * x_stride, x_stride, left < BLOCK ? left : BLOCK, inputs, memory + b * block_bytes);
            }
            sums = trivet_scratch(SCRATCH_SUMS, (size_t)(waiting * sums_bytes));
            if (!sums) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        }
        configure(few ? rows : BLOCK);
        const int64_t own = omp_get_thread_num();
        for (int64_t first, end, count; (few || sums) && (count = take(shares, num_threads, own, most, &first, &end));) {
            if (few) run_few(&p, first, first + count);
            else run_many(&p, first, first + count, sums);
        }
        _tile_release();
    }
    return failed ? -1 : 0;
}

/* Pack rows [first, first + rows) of a matrix of `inputs` columns, given as [rows, inputs] with a stride in elements,
 * into panels that hold zeros. */
void trivet_tiles_pack(const bf16_t *matrix, int64_t stride, int64_t first, int64_t rows, int64_t inputs, char *weight,
                       int64_t num_threads) {
    const int64_t steps = (inputs + STEP - 1) / STEP;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = first + r, column = row % BLOCK;
        char *to = weight + row / BLOCK * steps * STEP_BYTES + column / TILE_ROWS * TILE_SIZE + column % TILE_ROWS * 4;
        const bf16_t *from = matrix + r * stride;
        for (int64_t k = 0; k < inputs; k += 2) {
            const int64_t step = k / STEP, pair = k % STEP / 2;
            memcpy(to + step * STEP_BYTES + pair * TILE_BYTES, from + k, k + 1 < inputs ? 4 : 2);
        }
    }
}

#endif
