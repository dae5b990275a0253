/* Dividing a product among threads. */
#include "matmul.h"

#include <pthread.h>

/* Activations rounded at a time: they should stay in a core's second-level cache. */
#define CHUNK_BYTES (768 * 1024)
/* With more tiles, a panel takes so long to compute that fetching the next one is not worth the instructions. */
#define MOST_AHEAD 8
/* In a longer segment, what is fetched in front of it would come too much at a time. */
#define LONG_SEGMENT 256
/* Fewer are rounded by the calling thread. */
#define FEW_VALUES (16 * 1024)
/* Beyond it, rows would meet in the same sets of the first-level cache if their distance were a power of two. */
#define SKEW 64

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

typedef struct {
    char *data;
    size_t size;
} Scratch;

static void free_scratch(void *pointer) {
    Scratch *scratch = pointer;
    free(scratch->data);
    free(scratch);
}

static void make_key(void) { pthread_key_create(&scratch_key, free_scratch); }

/* `size` bytes that the calling thread keeps for its next call, NULL if there is no memory. */
static char *scratch_of(size_t size) {
    pthread_once(&scratch_once, make_key);
    Scratch *scratch = pthread_getspecific(scratch_key);
    if (!scratch) {
        scratch = calloc(1, sizeof *scratch);
        if (!scratch || pthread_setspecific(scratch_key, scratch)) {
            free(scratch);
            return NULL;
        }
    }
    if (scratch->size < size) {
        free(scratch->data);
        scratch->size = 0;
        size = (size + 4095) / 4096 * 4096;
        scratch->data = aligned_alloc(64, size);
        if (!scratch->data) return NULL;
        scratch->size = size;
    }
    return scratch->data;
}

static int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

static void store(const QuantLinear *layer, const float *tile, int rows, int64_t panel, void *out, int64_t out_stride,
                  int out_dtype) {
    int64_t column = panel * PANEL;
    int64_t count = layer->out_features - column < PANEL ? layer->out_features - column : PANEL;
    for (int r = 0; r < rows; r++) {
        const float *from = tile + r * layer->planes * PANEL;
        float sums[PANEL];
        memcpy(sums, from, sizeof sums);
        if (layer->planes == 2)
            for (int64_t c = 0; c < count; c++) sums[c] += from[PANEL + c];
        if (layer->bias)
            for (int64_t c = 0; c < count; c++) sums[c] += layer->bias[column + c];
        if (out_dtype == TRIVET_BF16) {
            bf16_t *to = (bf16_t *)out + r * out_stride + column;
            for (int64_t c = 0; c < count; c++) to[c] = float_to_bf16(sums[c]);
        } else {
            memcpy((float *)out + r * out_stride + column, sums, (size_t)count * sizeof(float));
        }
    }
}

static const char *at(const void *rows, int64_t row, int64_t stride, int dtype) {
    return (const char *)rows + row * stride * (dtype == TRIVET_BF16 ? 2 : 4);
}

/* The first of `count` panels that no other thread computes. */
static int64_t claim(int64_t *next, int64_t count) { return __atomic_fetch_add(next, count, __ATOMIC_RELAXED); }

/* Columns of one panel of the first `count` rows of `a`, in tiles of `height` rows; panel `next` comes after it. */
static void multiply_panel(const QuantLinear *layer, const Activations *a, int64_t count, int64_t height, int64_t panel,
                           int64_t next, void *out, int64_t out_stride, int out_dtype) {
    const int64_t planes = layer->planes, tiles = (count + height - 1) / height, segments = layer->num_segments;
    const int64_t lines = layer->segment * PANEL * layer->bits / 8 / 64;
    Ahead ahead = {.from = (const char *)layer->weight + next * segments * lines * 64};
    /* A single tile reads as fast as memory gives, and so does the processor's own prefetching. */
    if (tiles > 1 && tiles <= MOST_AHEAD && layer->segment <= LONG_SEGMENT && next * PANEL < layer->out_features)
        ahead.lines = (lines + tiles - 1) / tiles;
    for (int64_t r = 0; r < count; r += height, ahead.from += ahead.lines * segments * 64) {
        int here = (int)(count - r < height ? count - r : height);
        float tile[TILE * PANEL] __attribute__((aligned(64)));
        multiply_tile(layer, a, r * planes, here * (int)planes, panel, ahead, tile);
        store(layer, tile, here, panel, (void *)at(out, r, out_stride, out_dtype), out_stride, out_dtype);
    }
}

/* `out` [rows][out_features] = `x` [rows][in_features] times the weights, plus the bias. Strides are between rows, in
 * elements. Returns -1 if there is no memory for the rounded activations, otherwise 0. */
int trivet_quant_linear(const QuantLinear *layer, const void *x, int64_t x_stride, int x_dtype, int64_t rows, void *out,
                        int64_t out_stride, int out_dtype, int num_threads) {
    int64_t panels = (layer->out_features + PANEL - 1) / PANEL, segments = layer->num_segments;
    int64_t planes = layer->planes;
    Activations a = {.stride = round_up(layer->segment * segments, 64) + SKEW, .segments = segments};
    int64_t chunk = CHUNK_BYTES / (a.stride * planes) / TILE * TILE;
    if (chunk < 4 * TILE) chunk = 4 * TILE;
    /* Chunks of about equal heights, too. */
    int64_t chunks = (rows + chunk - 1) / chunk;
    if (chunks) chunk = (rows + chunks * TILE - 1) / (chunks * TILE) * TILE;
    if (chunk > rows) chunk = rows;
    size_t plane = (size_t)round_up(chunk * planes * segments * 4, 64);
    char *memory = scratch_of((size_t)(chunk * planes * a.stride) + 3 * plane);
    if (!memory) return -1;
    a.scale = (float *)memory;
    a.start = (int32_t *)(memory + plane);
    a.sum = (float *)(memory + 2 * plane);
    a.values = (int8_t *)(memory + 3 * plane);
    int64_t share = panels / (16 * num_threads) + 1;
    for (int64_t begin = 0; begin < rows; begin += chunk) {
        int64_t count = rows - begin < chunk ? rows - begin : chunk;
        /* Tiles of about equal heights: a low one makes little of the weights that it reads. */
        int64_t tiles = (count * planes + TILE - 1) / TILE, height = (count + tiles - 1) / tiles;
        /* Waking the others takes longer than rounding a few rows. */
        int rounding_threads = count * layer->in_features < FEW_VALUES ? 1 : num_threads;
#pragma omp parallel for num_threads(rounding_threads) if (rounding_threads > 1) schedule(static)
        for (int64_t r = 0; r < count; r++)
            quantize_row(layer, at(x, begin + r, x_stride, x_dtype), x_dtype, &a, r);
        int64_t free_panel = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        /* Threads claim panels one turn before they need them, to know what comes next. */
        for (int64_t panel = claim(&free_panel, share), next; panel < panels; panel = next) {
            int64_t end = panel + share < panels ? panel + share : panels;
            next = claim(&free_panel, share);
            for (; panel < end; panel++)
                multiply_panel(layer, &a, count, height, panel, panel + 1 < end ? panel + 1 : next,
                               (void *)at(out, begin, out_stride, out_dtype), out_stride, out_dtype);
        }
    }
    return 0;
}

/* Pack rows [first, first + rows) of a matrix, given as [rows][columns] bytes; columns beyond those are zero points. */
void trivet_quant_pack(const QuantLinear *layer, const uint8_t *values, int64_t columns, int64_t first, int64_t rows,
                       int num_threads) {
    const int64_t depth = layer->segment * layer->num_segments, bits = layer->bits, step = 32 / bits;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = first + r;
        uint8_t *to = (uint8_t *)layer->weight + row / PANEL * PANEL * depth * bits / 8 + row % PANEL * 4;
        const uint8_t *from = values + r * columns;
        for (int64_t k = 0; k < depth; k += step, to += 4 * PANEL) {
            for (int64_t i = 0; i < 4; i++) {
                uint8_t low = k + i < columns ? from[k + i] : (uint8_t)layer->zero_point;
                uint8_t high = k + i + 4 < columns ? from[k + i + 4] : (uint8_t)layer->zero_point;
                to[i] = bits == 8 ? low : (uint8_t)(low | high << 4);
            }
        }
    }
}
