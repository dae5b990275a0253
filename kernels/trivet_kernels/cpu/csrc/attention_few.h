/* Blocks of up to eight queries of a key head, by matrix tiles: what decodes are made of. Products of values are the
 * other way round than for more queries, rows of weights times columns of pairs of keys' values, since those take a
 * fraction of the time to arrange, and tiles of few rows less to multiply. An element of a product is the same to the
 * bit either way. Part of attention_task.c.
 *
 * Sums are [lane][v_dim], with numbers of values in the order in which unpacking leaves them: of 32, those at 0 … 3 of
 * every eight come first. */

#if HAS_TILES

enum { FEW = 8, SHAPE_FEW = -1 };

/* Whether groups of a kind are of few queries, and the head has numbers for whole vectors. */
static inline int are_few(const call_t *call, int kind) {
    return in_pairs(call) && kind == HALF && call->layer->value.dim % 32 == 0;
}

/* Tiles 0 and 1 are scores of keys, 2 and 3 sums of values, 4 and 5 keys or pairs of values, 6 queries, 7 weights. */
static void shape_few(void) {
    tile_shapes_t shapes = {0};
    for (int i = 0; i < NUM_TILES; i++)
        shape_tile(&shapes, i, i == 2 || i == 3 || i == 7 ? FEW : TILE_ROWS, i < 2 || i == 6 ? 4 * FEW : TILE_BYTES);
    use_shapes(&shapes);
}

/* Pairs of keys' values side by side, [pairs of the block][v_dim]; see gather_values for those that are not there. */
static void gather_few(const block_t *block) {
    const trivet_attention_layer *layer = block->layer;
    const keys_t *keys = block->keys;
    const int64_t v_dim = layer->value.dim, offset = block->group->head * layer->value.head;
    const int begin = keys->from / TILE_INPUTS * TILE_INPUTS, end = (int)round_up(keys->to, TILE_INPUTS);
    bf16_t *out = (bf16_t *)block->scratch->values + begin * v_dim;
    for (int n = begin; n < end; n += 2, out += 2 * v_dim) {
        const __mmask32 even = n >= keys->from && n < keys->to ? 0xffffffffu : 0;
        const __mmask32 odd = n + 1 >= keys->from && n + 1 < keys->to ? 0xffffffffu : 0;
        const char *evens = keys->value[even ? n : keys->from] + offset;
        const char *odds = keys->value[odd ? n + 1 : keys->from] + offset;
        for (int64_t d = 0; d < v_dim; d += 32) {
            const __m512i a = _mm512_maskz_loadu_epi16(even, evens + 2 * d);
            const __m512i b = _mm512_maskz_loadu_epi16(odd, odds + 2 * d);
            _mm512_storeu_si512(out + 2 * d, _mm512_unpacklo_epi16(a, b));
            _mm512_storeu_si512(out + 2 * d + 32, _mm512_unpackhi_epi16(a, b));
        }
        if (n % 4 == 0) fetch(block->ahead, FETCH_TURN);
    }
}

static inline void score_few(const block_t *block, float *scores) {
    const scratch_t *scratch = block->scratch;
    const int64_t stride = scratch->key_stride, steps = num_steps(1, block->layer->key.dim);
    const char *query = (const char *)(scratch->query + steps * block->group->offset);
    const int first = block->from / TILE_ROWS, last = (block->to + TILE_ROWS - 1) / TILE_ROWS;
    for (int i = first; i < last; i += 2) {
        /* Two tiles at a time; where only one is left, it is multiplied twice. */
        const int other = i + 1 < last ? i + 1 : i;
        const char *rows = scratch->key_rows[i], *others = scratch->key_rows[other];
        __asm__ volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t step = 0; step < steps / TILE_PAIRS; step++) {
            _tile_loadd(6, query + step * TILE_PAIRS * FEW * 4, FEW * 4);
            _tile_loadd(4, rows + step * TILE_BYTES, stride);
            fetch(block->ahead, FETCH_PRODUCT);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, others + step * TILE_BYTES, stride);
            fetch(block->ahead, FETCH_PRODUCT);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, scores + i * TILE_ROWS * FEW, FEW * 4);
        _tile_stored(1, scores + other * TILE_ROWS * FEW, FEW * 4);
    }
}

/* Pairs of weights as rows of lanes, [keys / TILE_INPUTS][lane][TILE_PAIRS]. */
static inline void turn_weights(const vi8 *weights, __m512i *out) {
    __m512i rows[16];
    for (int i = 0; i < TILE_PAIRS; i++)
        rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)weights[i]), (__m256i)weights[TILE_PAIRS + i], 1);
    turn(rows);
    for (int i = 0; i < 16; i++) out[i] = rows[i];
}

static inline void weigh_few(const block_t *block, int first, int last, const char *weights, float *out) {
    const int64_t v_dim = block->layer->value.dim, width = v_dim * 4;
    for (int64_t d = 0; d < v_dim; d += 32) {
        __asm__ volatile("" ::: "memory");
        _tile_loadd(2, out + d, width);
        _tile_loadd(3, out + d + 16, width);
        for (int step = first / TILE_PAIRS; step < last / TILE_PAIRS; step++) {
            const char *values = (const char *)(block->scratch->values + step * TILE_PAIRS * v_dim + d);
            _tile_loadd(7, weights + step * FEW * TILE_BYTES, TILE_BYTES);
            _tile_loadd(4, values, width);
            fetch(block->ahead, FETCH_PRODUCT);
            _tile_dpbf16ps(2, 7, 4);
            _tile_loadd(5, values + TILE_BYTES, width);
            fetch(block->ahead, FETCH_PRODUCT);
            _tile_dpbf16ps(3, 7, 5);
        }
        _tile_stored(2, out + d, width);
        _tile_stored(3, out + d + 16, width);
    }
}

/* As NAME(block) in attention_block.h. */
static void few_block(const block_t *block, float *state) {
    const int64_t v_dim = block->layer->value.dim;
    float *scores = block->scratch->scores, *most = state + FEW * v_dim, *total = most + FEW;
    char *weights = (char *)block->scratch->weights, *turned = weights + BLOCK / 2 * FEW * 4;
    vf8 decay;
    int first, last;
    score_few(block, scores);
    if (pair_half_rate(1, block, (vf8 *)scores, (vi8 *)weights, (vf8 *)most, (vf8 *)total, &decay, &first, &last))
        for (int lane = 0; lane < FEW; lane++)
            for (int64_t d = 0; d < v_dim; d++) state[lane * v_dim + d] *= decay[lane];
    turn_weights((const vi8 *)weights, (__m512i *)turned);
    weigh_few(block, first, last, turned, state);
}

/* As NAME(merge). */
static void few_merge(int64_t v_dim, float *state, const float *part) {
    vf8 *most = (vf8 *)(state + FEW * v_dim), *total = most + 1;
    const vf8 *part_most = (const vf8 *)(part + FEW * v_dim), *part_total = part_most + 1;
    const vf8 top = vf8_max(*most, *part_most), mine = vf8_exp2(*most - top), others = vf8_exp2(*part_most - top);
    *most = top;
    *total = vf8_add(*total * mine, *part_total, others);
    for (int lane = 0; lane < FEW; lane++)
        for (int64_t d = lane * v_dim; d < (lane + 1) * v_dim; d += 16)
            *(vf16 *)(state + d) = vf16_add(*(vf16 *)(state + d) * mine[lane], *(const vf16 *)(part + d),
                                            vf16_splat(others[lane]));
}

/* As store_pairs. */
static void store_few(const float *sums, const float *factors, int count, int64_t v_dim, char *const *to) {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    for (int lane = 0; lane < count; lane++)
        for (int64_t d = 0; d < v_dim; d += 32) {
            const vf16 *sum = (const vf16 *)(sums + lane * v_dim + d), factor = vf16_splat(factors[lane]);
            const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh((__m512)(sum[1] * factor), (__m512)(sum[0] * factor));
            _mm512_storeu_si512(to[lane] + 2 * d, _mm512_permutexvar_epi64(order, pairs));
        }
}

#else

static inline int are_few(const call_t *call, int kind) {
    (void)call, (void)kind;
    return 0;
}

#endif
