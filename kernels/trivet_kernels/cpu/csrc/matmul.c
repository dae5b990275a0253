/* Dividing a product among threads. */
#include "matmul_store.h"
#include "matmul_tiles.h"
#include "scratch.h"
#include "shares.h"

extern int omp_get_thread_num(void);

/* Activations rounded at a time: they should stay in a core's second-level cache. */
#define CHUNK_BYTES (768 * 1024)
/* Rows that are multiplied by matrix tiles at a time, for the same reason. */
#define TILED_ROWS 256
/* Most bytes of rounded activations that every thread copies. */
#define MOST_COPIED (128 * 1024)
/* With more tiles, a panel takes so long to compute that fetching the next one is not worth the instructions. */
#define MOST_AHEAD 8
/* In a longer segment, what is fetched in front of it would come too much at a time. */
#define LONG_SEGMENT 256
/* Fewer are rounded by the calling thread. */
#define FEW_VALUES (16 * 1024)
/* Beyond it, rows would meet in the same sets of the first-level cache if their distance were a power of two. */
#define SKEW 64

static const char *at(const void *rows, int64_t row, int64_t stride, int dtype) {
    return (const char *)rows + row * stride * (dtype == TRIVET_BF16 ? 2 : 4);
}

/* The first of `count` stripes that no other thread computes. */
static int64_t claim(int64_t *next, int64_t count) { return __atomic_fetch_add(next, count, __ATOMIC_RELAXED); }

/* How a chunk of rows is computed. A stripe is what is stored together: a panel, or with a gate, the panel of gate and
 * that of up. */
typedef struct {
    int64_t stripes, panels; /* of a stripe */
    int64_t height;          /* of tiles of registers */
} Work;

/* Columns of one stripe of the first `count` rows of `a`, in tiles of registers; stripe `next` comes after it. */
static void multiply_stripe(const QuantLinear *layer, const Activations *a, const Work *work, int64_t count,
                            int64_t stripe, int64_t next, const Output *out) {
    const int64_t planes = layer->planes, height = work->height, tiles = (count + height - 1) / height;
    const int64_t segments = layer->num_segments, lines = layer->segment * PANEL * layer->bits / 8 / 64;
    const store_function store = storing(out);
    Ahead ahead[2] = {{NULL, 0}, {NULL, 0}};
    for (int64_t p = 0; p < work->panels; p++) {
        ahead[p].from = (const char *)layer->weight + (p * work->stripes + next) * segments * lines * 64;
        /* A single tile reads as fast as memory gives, and so does the processor's own prefetching. */
        if (tiles > 1 && tiles <= MOST_AHEAD && layer->segment <= LONG_SEGMENT && next < work->stripes)
            ahead[p].lines = (lines + tiles - 1) / tiles;
    }
    for (int64_t r = 0; r < count; r += height) {
        int here = (int)(count - r < height ? count - r : height);
        float sums[2][TILE * PANEL] __attribute__((aligned(64)));
        for (int64_t p = 0; p < work->panels; p++) {
            multiply_tile(layer, a, r * planes, here * (int)planes, p * work->stripes + stripe, ahead[p], sums[p]);
            ahead[p].from += ahead[p].lines * segments * 64;
        }
        store(layer, sums[0], sums[1], r, here, stripe, out);
    }
}

/* The stripes of the first `count` rows of `a` that this thread gets hold of. */
static void multiply_stripes(const QuantLinear *layer, const Activations *a, const Work *work, int64_t count,
                             int64_t *free_stripe, int64_t share, const Output *out) {
    /* Threads claim stripes one turn before they need them, to know what comes next. */
    for (int64_t stripe = claim(free_stripe, share), next; stripe < work->stripes; stripe = next) {
        int64_t end = stripe + share < work->stripes ? stripe + share : work->stripes;
        next = claim(free_stripe, share);
        for (; stripe < end; stripe++)
            multiply_stripe(layer, a, work, count, stripe, stripe + 1 < end ? stripe + 1 : next, out);
    }
}

#if HAS_TILES
/* The calling thread's copy of what all threads read over and over between streams of weights: with memory of their own
 * two cores take a quarter less time for 32 rows of 896 bytes. Many rows do not stay in a cache in either case. */
static int8_t *own_rows(const TiledProduct *p, int num_threads) {
    const size_t size = (size_t)(round_up(p->rows, p->a->unit) * p->a->stride);
    char *copy = num_threads > 1 && size <= MOST_COPIED ? trivet_scratch(SCRATCH_COPIED, size) : NULL;
    return copy ? memcpy(copy, p->a->values, size) : p->a->values;
}
#endif

/* Rows of activations in a chunk: as many as fit into `bytes`, at least four times `step`, in chunks of about equal
 * heights that are multiples of `step`. */
static int64_t chunk_of(int64_t rows, int64_t row_bytes, int64_t bytes, int64_t step) {
    int64_t chunk = bytes / row_bytes / step * step;
    if (chunk < 4 * step) chunk = 4 * step;
    int64_t chunks = (rows + chunk - 1) / chunk;
    if (chunks) chunk = (rows + chunks * step - 1) / (chunks * step) * step;
    return chunk < rows ? chunk : rows;
}

/* `out` [rows][out_features] = `x` [rows][in_features] times the weights, plus the bias. With a gate, whose weights are
 * the first half of the outputs, `out` [rows][out_features / 2] = activation(gate) * up, and `out_features` is a
 * multiple of 2 * PANEL. Strides are between rows, in elements. Returns -1 if there is no memory for the rounded
 * activations, otherwise 0. */
int trivet_quant_linear(const QuantLinear *layer, const void *x, int64_t x_stride, int x_dtype, int64_t rows, void *out,
                        int64_t out_stride, int out_dtype, int gate, int num_threads) {
    const int64_t planes = layer->planes, segments = layer->num_segments;
    Work work = {.stripes = (layer->out_features + PANEL - 1) / PANEL, .panels = 1};
    if (gate != NO_GATE) work.stripes /= 2, work.panels = 2;
    Activations a = {.stride = round_up(layer->segment * segments, 64) + SKEW, .segments = segments,
                     .unit = 1, .step = 64, .padded = layer->segment};
    int64_t chunk = chunk_of(rows, a.stride * planes, CHUNK_BYTES, TILE), height = chunk * planes;
    size_t room_size = 0;
#if HAS_TILES
    const int tiled = tiles_suit(layer, rows * planes);
    TiledProduct product = {.layer = layer, .a = &a, .stripes = work.stripes, .panels = work.panels};
    if (tiled) {
        lay_out_for_tiles(layer, &a);
        chunk = chunk_of(rows, planes, TILED_ROWS, a.unit);
        product.rows = chunk * planes;
        height = round_up(product.rows, a.unit);
        product.group = tiles_group(&product, num_threads);
        room_size = tiles_room(&product);
        /* The last chunk is lower, and may be of one unit, which is divided in another way. */
        product.rows = ((rows - 1) % chunk + 1) * planes;
        if (tiles_room(&product) > room_size) room_size = tiles_room(&product);
    }
#endif
    const size_t plane = (size_t)round_up(height * segments * 4, 64), values_size = (size_t)round_up(height * a.stride, 64);
    char *memory = trivet_scratch(SCRATCH_ROUNDED, values_size + 3 * plane);
    if (!memory) return -1;
    a.scale = (float *)memory;
    a.start = (int32_t *)(memory + plane);
    a.sum = (float *)(memory + 2 * plane);
    a.values = (int8_t *)(memory + 3 * plane);
    int failed = 0;
    int64_t share = work.stripes / (16 * num_threads) + 1;
    for (int64_t begin = 0; begin < rows; begin += chunk) {
        int64_t count = rows - begin < chunk ? rows - begin : chunk;
        const Output to = {(char *)at(out, begin, out_stride, out_dtype), out_stride, out_dtype, gate};
        /* Waking the others takes longer than rounding a few rows. */
        int rounding_threads = count * layer->in_features < FEW_VALUES ? 1 : num_threads;
#if HAS_TILES
        /* Scales of the rows beyond the last are numbers, too. */
        if (tiled && count * planes % a.unit) {
            const int64_t unit = count * planes / a.unit * a.unit * segments;
            memset(a.scale + unit, 0, (size_t)(a.unit * segments) * sizeof(float));
            memset(a.sum + unit, 0, (size_t)(a.unit * segments) * sizeof(float));
        }
#endif
#pragma omp parallel for num_threads(rounding_threads) if (rounding_threads > 1) schedule(static)
        for (int64_t r = 0; r < count; r++)
            quantize_row(layer, at(x, begin + r, x_stride, x_dtype), x_dtype, &a, r);
#if HAS_TILES
        if (tiled) {
            share_t shares[num_threads];
            divide_shares(shares, num_threads, work.stripes);
            product.rows = count * planes;
            product.out = &to;
            product.store = storing(&to);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
            {
                const int64_t own = omp_get_thread_num();
                int64_t tile_height = 0;
                Activations mine = a;
                TiledProduct p = product;
                /* Not a part of memory that all share: a core that reads on and on fetches what comes next, too, and if
                 * another one writes there, they take it from each other all the time. */
                char *room = trivet_scratch(SCRATCH_SUMS, room_size);
                mine.values = own_rows(&product, num_threads);
                p.a = &mine;
                if (!room) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
                else begin_tiles(&p, room); /* for each chunk: the threads need not be those of the one before */
                for (int64_t first, end, some; room && (some = take(shares, num_threads, own, p.group, &first, &end));)
                    multiply_tiled(&p, first, some, end, room, &tile_height);
                end_tiles();
            }
            continue;
        }
#endif
        /* Tiles of about equal heights: a low one makes little of the weights that it reads. */
        int64_t tiles = (count * planes + TILE - 1) / TILE;
        work.height = (count + tiles - 1) / tiles;
        int64_t free_stripe = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        multiply_stripes(layer, &a, &work, count, &free_stripe, share, &to);
    }
    return failed ? -1 : 0;
}

/* A multiply_function of block.h. */
int64_t trivet_quant_multiply(const void *layer, const void *x, int64_t x_stride, int64_t rows, void *out,
                              int64_t out_stride, int64_t gate, int64_t dtype, int64_t num_threads) {
    return trivet_quant_linear(layer, x, x_stride, (int)dtype, rows, out, out_stride, (int)dtype, (int)gate,
                               (int)num_threads);
}

/* Pack rows [first, first + rows) of a matrix, given as [rows][columns] bytes; columns beyond those are zero points. */
void trivet_quant_pack(const QuantLinear *layer, const uint8_t *values, int64_t columns, int64_t first, int64_t rows,
                       int num_threads) {
    const int64_t depth = layer->segment * layer->num_segments, bits = layer->bits, step = 32 / bits;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = first + r;
        uint8_t *to = (uint8_t *)layer->weight + row / HALF * HALF * depth * bits / 8 + row % HALF * 4;
        const uint8_t *from = values + r * columns;
        for (int64_t k = 0; k < depth; k += step, to += 4 * HALF) {
            for (int64_t i = 0; i < 4; i++) {
                uint8_t low = k + i < columns ? from[k + i] : (uint8_t)layer->zero_point;
                uint8_t high = k + i + 4 < columns ? from[k + i + 4] : (uint8_t)layer->zero_point;
                to[i] = bits == 8 ? low ^ STORED_SIGN : (uint8_t)(low | high << 4);
            }
        }
    }
}
