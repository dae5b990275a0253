/* Matrix tiles (AMX), which only the richest level has: eight registers of up to 16 rows of 64 bytes.
 *
 * A product adds rows times columns to a tile of float32 or int32: the left factor has rows of 32 bfloat16 or 64 bytes;
 * the right one has for every pair of inputs (four of bytes) a row with the pairs of up to 16 columns side by side. What
 * a product adds to an element depends on its row and its column only, however many there are of both.
 *
 * Whoever uses tiles configures them first, and releases them at the end: other libraries in the thread have shapes of
 * their own, and the system saves tiles that are in use whenever it switches threads. The permission that Linux wants
 * asked for is asked for when the level is chosen (levels.py). */
#ifndef TRIVET_TILES_H
#define TRIVET_TILES_H

#include "common.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define HAS_TILES 1

#include <immintrin.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64, NUM_TILES = 8 };

/* The shapes of all tiles, as the instruction takes them. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) tile_shapes_t;

/* Tile `tile` has `rows` rows of `bytes` bytes. */
static inline void shape_tile(tile_shapes_t *shapes, int tile, int rows, int bytes) {
    shapes->palette = 1;
    shapes->bytes[tile] = (uint16_t)bytes;
    shapes->rows[tile] = (uint8_t)rows;
}

/* Take the shapes. Not the intrinsic: to GCC 12 that reads eight bytes of them, and leaves the others unwritten. */
static inline void use_shapes(const tile_shapes_t *shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(*shapes)); }

#else
#define HAS_TILES 0
#endif

#endif
