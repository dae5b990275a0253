/* Products of a block by matrix tiles: rows of keys times columns of pairs of queries' numbers, and rows of values, one
 * number of all keys in each, times columns of pairs of keys' weights. Both leave the numbers of lanes side by side, as
 * products of vectors do. Part of attention_task.c. */
enum { TILE_INPUTS = 32, TILE_PAIRS = TILE_INPUTS / 2 };

#if HAS_TILES

/* Tiles 0 … 3 are sums, 4 and 5 rows, 6 and 7 columns; columns and sums are of so many lanes. */
static inline void shape_tiles(int lanes) {
    tile_shapes_t shapes = {0};
    for (int i = 0; i < NUM_TILES; i++)
        shape_tile(&shapes, i, TILE_ROWS, i == 4 || i == 5 ? TILE_BYTES : 4 * lanes);
    use_shapes(&shapes);
}

/* Sums of products of `num` tiles of rows (at most 4 / nv) with `nv` tiles of columns, over `steps` times TILE_INPUTS
 * numbers; `add`: to what is there. `rows` are where the tiles of rows begin; `stride` bytes lie between rows, and
 * `width` between those of columns and of sums. */
ALWAYS_INLINE void multiply(const int num, const int nv, const int add, const char *const *rows, int64_t stride,
                            const char *columns, int64_t steps, char *sums, int64_t width, ahead_t *ahead) {
    const int64_t below = TILE_ROWS * width;
    const int64_t place[4] = {0, nv == 2 ? TILE_BYTES : below, nv == 2 ? below : 2 * below,
                              nv == 2 ? below + TILE_BYTES : 3 * below};
    /* The compiler may not know that tiles are loaded from memory. */
    __asm__ volatile("" ::: "memory");
    if (add) {
        _tile_loadd(0, sums, width);
        if (num * nv > 1) _tile_loadd(1, sums + place[1], width);
        if (num * nv > 2) _tile_loadd(2, sums + place[2], width);
        if (num * nv > 2) _tile_loadd(3, sums + place[3], width);
    } else {
        _tile_zero(0);
        if (num * nv > 1) _tile_zero(1);
        if (num * nv > 2) _tile_zero(2);
        if (num * nv > 2) _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i++) {
        _tile_loadd(6, columns + i * below, width);
        _tile_loadd(4, rows[0] + i * TILE_BYTES, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (nv == 2) {
            _tile_loadd(7, columns + i * below + TILE_BYTES, width);
            _tile_dpbf16ps(1, 4, 7);
            fetch(ahead, FETCH_PRODUCT);
            if (num == 1) continue;
            _tile_loadd(5, rows[1] + i * TILE_BYTES, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            fetch(ahead, FETCH_PRODUCT);
        } else {
            if (num == 1) continue;
            fetch(ahead, FETCH_PRODUCT);
            _tile_loadd(5, rows[1] + i * TILE_BYTES, stride);
            _tile_dpbf16ps(1, 5, 6);
            fetch(ahead, FETCH_PRODUCT);
            _tile_loadd(4, rows[2] + i * TILE_BYTES, stride);
            _tile_dpbf16ps(2, 4, 6);
            fetch(ahead, FETCH_PRODUCT);
            _tile_loadd(5, rows[3] + i * TILE_BYTES, stride);
            _tile_dpbf16ps(3, 5, 6);
            fetch(ahead, FETCH_PRODUCT);
        }
    }
    _tile_stored(0, sums, width);
    if (num * nv > 1) _tile_stored(1, sums + place[1], width);
    if (num * nv > 2) _tile_stored(2, sums + place[2], width);
    if (num * nv > 2) _tile_stored(3, sums + place[3], width);
}

#endif
