/* Products of many rows, with matrix tiles where the level has them. */
#ifndef TRIVET_MATMUL_TILES_H
#define TRIVET_MATMUL_TILES_H

#include "matmul_store.h"

#if HAS_TILES

/* A product of (rounded) rows that stay where they are, and what is stored of it. A stripe is what is stored together:
 * a panel, or with a gate, panel `stripe` and the one that is `stripes` further. */
typedef struct {
    const QuantLinear *layer;
    const Activations *a;
    const Output *out;
    store_function store; /* of `out` */
    int64_t rows; /* of `a` */
    int64_t stripes, panels; /* of a stripe: 1 or 2 */
    int64_t group; /* most stripes that are computed together */
} TiledProduct;

/* Whether tiles can compute, and are worth it for, that many rows of activations. */
int tiles_suit(const QuantLinear *layer, int64_t rows);

/* Say how rows are laid out for tiles. */
void lay_out_for_tiles(const QuantLinear *layer, Activations *a);

/* Stripes that threads should take at a time. */
int64_t tiles_group(const TiledProduct *p, int num_threads);

/* Bytes of memory, aligned to 64, that a thread needs, and what it does with them before its first stripes. */
size_t tiles_room(const TiledProduct *p);
void begin_tiles(const TiledProduct *p, char *memory);

/* Compute and store stripes [first, first + count), count <= group. The stripes after them, as far as they are below
 * `end`, are fetched meanwhile. `height` is the thread's own, 0 at first; end_tiles comes after the last call. */
void multiply_tiled(const TiledProduct *p, int64_t first, int64_t count, int64_t end, char *memory, int64_t *height);
void end_tiles(void);

#endif
#endif
