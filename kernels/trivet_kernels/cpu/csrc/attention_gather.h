/* Keys and values of a block in the form that products take: beside each other, so that they do not fight for places
 * in the processor's cache as rows at distances of a power of two do. Part of attention_task.c. */

/* A short memcpy, in vectors: a call takes as long as what it copies. */
ALWAYS_INLINE void copy(void *to, const void *from, int64_t size) {
    typedef float vector __attribute__((vector_size(4 * FULL), may_alias, aligned(1)));
    int64_t at = 0;
    for (; at + (int64_t)sizeof(vector) <= size; at += sizeof(vector))
        *(vector *)((char *)to + at) = *(const vector *)((const char *)from + at);
    if (at < size) memcpy((char *)to + at, (const char *)from + at, (size_t)(size - at));
}

/* Of a head, in float32. */
static void gather_floats(const block_t *block, scratch_t *scratch) {
    const trivet_attention_layer *layer = block->layer;
    const keys_t *keys = block->keys;
    const int64_t head = block->group->head, dim = layer->key.dim, v_dim = layer->value.dim;
    for (int n = keys->from; n < keys->to; n++) {
        copy(scratch->keys + n * dim, keys->key[n] + head * layer->key.head, dim * 4);
        copy(scratch->values + n * v_dim, keys->value[n] + head * layer->value.head, v_dim * 4);
    }
}

#if HAS_TILES

/* Eight numbers of each of 32 keys, which are in four runs of eight rows, to eight rows of 32 numbers. */
ALWAYS_INLINE void transpose(const char *const *runs, int64_t stride, __m512i *out) {
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m128i first = _mm_loadu_si128((const __m128i *)(runs[0] + i * stride));
        a[i] = _mm512_castsi128_si512(first);
        a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const __m128i *)(runs[1] + i * stride)), 1);
        a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const __m128i *)(runs[2] + i * stride)), 2);
        a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const __m128i *)(runs[3] + i * stride)), 3);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm512_unpacklo_epi32(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi32(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi32(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi32(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        out[2 * i] = _mm512_unpacklo_epi64(a[i], a[i + 4]);
        out[2 * i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 4]);
    }
}

/* Values of keys first … first + 31 of the block, those that are not there as zeros: whatever is in their places may be
 * no number, and zero weights would not hide that. */
static void gather_values(const block_t *block, int first) {
    const trivet_attention_layer *layer = block->layer;
    const scratch_t *scratch = block->scratch;
    const keys_t *keys = block->keys;
    const int64_t v_dim = layer->value.dim, head = block->group->head;
    const int from = keys->from > first ? keys->from : first;
    const int to = keys->to < first + TILE_INPUTS ? keys->to : first + TILE_INPUTS;
    const char *runs[4];
    int64_t stride = layer->value.token;
    __mmask32 there = (__mmask32)((1ull << (to - first)) - (1ull << (from - first)));
    if (layer->block_size % 8 == 0 && v_dim % 8 == 0) {
        for (int i = 0; i < 4; i++) {
            const int begin = first + 8 * i;
            const int any = begin + 8 <= from || begin >= to ? from : begin < from ? from : begin;
            runs[i] = keys->value[any] + head * layer->value.head - (any & 7) * stride;
        }
    } else {
        char *rows = (char *)(scratch->values + BLOCK / 2 * round_up(v_dim, TILE_ROWS));
        stride = round_up(v_dim, 8) * 2;
        for (int i = 0; i < 4; i++) runs[i] = rows + 8 * i * stride;
        for (int n = from; n < to; n++)
            copy(rows + (n - first) * stride, keys->value[n] + head * layer->value.head, v_dim * 2);
    }
    bf16_t *out = (bf16_t *)scratch->values + first;
    for (int64_t d = 0; d < v_dim; d += 8, out += 8 * BLOCK) {
        __m512i rows[8];
        transpose(runs, stride, rows);
        for (int i = 0; i < 4; i++) runs[i] += 16;
        fetch(block->ahead, FETCH_TURN);
        if (there == 0xffffffffu)
            for (int i = 0; i < 8; i++) _mm512_storeu_si512(out + i * BLOCK, rows[i]);
        else
            for (int i = 0; i < 8; i++) _mm512_storeu_si512(out + i * BLOCK, _mm512_maskz_mov_epi16(there, rows[i]));
    }
}

/* Of a head, in bfloat16. For the products of one group keys stay where they are, if tiles of them can be loaded from
 * there: what lies beside the wanted ones does no harm. `few`: values are those that attention_few.h multiplies. */
static void gather_bf16(const block_t *block, scratch_t *scratch, int once, int few) {
    const trivet_attention_layer *layer = block->layer;
    const keys_t *keys = block->keys;
    const int64_t dim = layer->key.dim, padded = num_steps(1, dim) * 4, offset = block->group->head * layer->key.head;
    const int stay = once && layer->block_size % TILE_ROWS == 0 && dim % TILE_INPUTS == 0;
    scratch->key_stride = stay ? layer->key.token : padded;
    for (int i = keys->from / TILE_ROWS, n = keys->from; n < keys->to; n = ++i * TILE_ROWS)
        scratch->key_rows[i] = stay ? keys->key[n] + offset - (n - i * TILE_ROWS) * layer->key.token
                                    : (const char *)scratch->keys + i * TILE_ROWS * padded;
    for (int n = keys->from; n < keys->to && !stay; n++) {
        char *key = (char *)scratch->keys + n * padded;
        copy(key, keys->key[n] + offset, dim * 2);
        if (dim * 2 < padded) memset(key + dim * 2, 0, (size_t)(padded - dim * 2));
    }
    if (few) {
        gather_few(block);
        return;
    }
    for (int first = 0; first < BLOCK; first += TILE_INPUTS)
        if (first < keys->to && first + TILE_INPUTS > keys->from) gather_values(block, first);
}

#elif HAS_PAIRS

/* The numbers of two rows side by side. */
ALWAYS_INLINE void interleave(const bf16_t *even, const bf16_t *odd, int64_t size, uint32_t *restrict out) {
    const __m512i step = _mm512_set1_epi16(16);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, step);
    int64_t i = 0;
    for (; i + 32 <= size; i += 32) {
        const __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
        _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(a, high, b));
    }
    for (; i < size; i++) out[i] = even[i] | (uint32_t)odd[i] << 16;
}

/* Of a head, in bfloat16. */
static void gather_bf16(const block_t *block, scratch_t *scratch, int once, int few) {
    const trivet_attention_layer *layer = block->layer;
    const keys_t *keys = block->keys;
    const int64_t head = block->group->head, dim = layer->key.dim, v_dim = layer->value.dim, steps = (dim + 1) / 2;
    for (int n = keys->from; n < keys->to; n++) {
        bf16_t *key = (bf16_t *)(scratch->keys + n * steps);
        copy(key, keys->key[n] + head * layer->key.head, dim * 2);
        if (dim % 2) key[dim] = 0;
    }
    for (int i = keys->from / 2; i <= (keys->to - 1) / 2; i++) {
        uint32_t *pairs = (uint32_t *)(scratch->values + i * v_dim);
        const int has_even = 2 * i >= keys->from, has_odd = 2 * i + 1 < keys->to;
        const bf16_t *even = (const bf16_t *)(keys->value[2 * i + !has_even] + head * layer->value.head);
        const bf16_t *odd = (const bf16_t *)(keys->value[2 * i + has_odd] + head * layer->value.head);
        if (has_even && has_odd) {
            interleave(even, odd, v_dim, pairs);
        } else {
            const uint32_t even_bits = has_even ? 0xffffu : 0, odd_bits = has_odd ? 0xffffu : 0;
            for (int64_t d = 0; d < v_dim; d++) pairs[d] = (even[d] & even_bits) | (odd[d] & odd_bits) << 16;
        }
    }
}

#else

/* Of a head, from bfloat16. */
static void gather_bf16(const block_t *block, scratch_t *scratch, int once, int few) {
    const trivet_attention_layer *layer = block->layer;
    const keys_t *keys = block->keys;
    const int64_t head = block->group->head, dim = layer->key.dim, v_dim = layer->value.dim;
    for (int n = keys->from; n < keys->to; n++) {
        float *restrict key = scratch->keys + n * dim, *restrict value = scratch->values + n * v_dim;
        const bf16_t *from_key = (const bf16_t *)(keys->key[n] + head * layer->key.head);
        const bf16_t *from_value = (const bf16_t *)(keys->value[n] + head * layer->value.head);
        for (int64_t i = 0; i < dim; i++) key[i] = bf16_to_float(from_key[i]);
        for (int64_t i = 0; i < v_dim; i++) value[i] = bf16_to_float(from_value[i]);
    }
}

#endif
