/* Products of many rows, with matrix tiles where the level has them. */
#ifndef TRIVET_MATMUL_TILES_H
#define TRIVET_MATMUL_TILES_H

#include "matmul.h"

#if HAS_TILES

/* How rows are divided: tiles of `rows` rows, and one or two of them computed together. Rows are computed in whole
 * tiles, so activations need memory beyond the last row. */
typedef struct {
    int rows, tiles;
} TileRows;

/* Whether tiles can compute, and are worth it for, that many rows of (rounded) activations. */
int tiles_suit(const QuantLinear *layer, int64_t rows);

TileRows tile_rows_of(int64_t rows);

/* Before and after a thread uses the function below. */
void begin_tiles(const QuantLinear *layer, TileRows shape);
void end_tiles(void);

/* Bytes of memory, aligned to 64, that a thread needs for that. */
size_t tiles_room(const QuantLinear *layer);

/* The products of the first `rows` rows of `a` with panel `panel`, as [rows][PANEL] float32, while panel `next` is
 * fetched, unless it is negative. */
void multiply_panel_tiled(const QuantLinear *layer, const Activations *a, int64_t rows, TileRows shape, int64_t panel,
                          int64_t next, char *memory, float *totals);

#endif
#endif
