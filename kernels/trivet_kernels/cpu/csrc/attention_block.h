/* A group of lanes over one block of keys; included once for every vector and kind of product.
 *
 * N: lanes of a vector. PAIRS: whether products are of pairs of bfloat16 (by matrix tiles where there are any, else by
 * an instruction for vectors) or of single floats. NAME(x): what functions are called here. */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define VF JOIN(vf, N)
#define VI JOIN(vi, N)
#define VF_(x) JOIN(JOIN(vf, N), x)

#if PAIRS
typedef int32_t NAME(element) __attribute__((may_alias, aligned(2)));
typedef VI NAME(elements);
#if N == 16
#define DOT(sum, a, b) ((VF)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)_mm512_set1_epi32(b)))
#else
#define DOT(sum, a, b) ((VF)_mm256_dpbf16_ps((__m256)(sum), (__m256bh)(a), (__m256bh)_mm256_set1_epi32(b)))
#endif
#else
typedef float NAME(element);
typedef VF NAME(elements);
#define DOT(sum, a, b) VF_(_add)(sum, a, VF_(_splat)(b))
#endif

/* Two products, of the block's keys and of its values:
 *
 * scores[n][lane] = scale * query · key n, where products are of pairs without the scale;
 * out[d][lane] = out[d][lane] * decay[lane] + sum over keys of weight[key][lane] * value[key][d]. */
#if PAIRS && HAS_TILES

/* Keys beside the wanted ones in their tiles are multiplied too, whatever they are. */
ALWAYS_INLINE void NAME(score)(const int nv, const block_t *block, VF *scores) {
    const scratch_t *scratch = block->scratch;
    const int each = 4 / nv, last = (block->to + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t steps = num_steps(1, block->layer->key.dim), width = sizeof(VF) * nv;
    const char *query = (const char *)(scratch->query + steps * block->group->offset);
    for (int i = block->from / TILE_ROWS; i < last;) {
        const int num = i + each <= last ? each : 1;
        const char *const *rows = scratch->key_rows + i;
        char *sums = (char *)(scores + i * TILE_ROWS * nv);
        if (num == each)
            multiply(each, nv, 0, rows, scratch->key_stride, query, steps / TILE_PAIRS, sums, width, block->ahead);
        else
            multiply(1, nv, 0, rows, scratch->key_stride, query, steps / TILE_PAIRS, sums, width, block->ahead);
        i += num;
    }
}

ALWAYS_INLINE void NAME(weigh)(const int nv, const block_t *block, int first, int last, int changed, const VF *decay,
                               const NAME(elements) *weights, VF *out) {
    const int64_t v_dim = block->layer->value.dim;
    if (changed)
        for (int64_t d = 0; d < v_dim; d++)
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++) out[d * nv + v] *= decay[v];
    const char *values = (const char *)((const bf16_t *)block->scratch->values + 2 * first);
    const char *columns = (const char *)(weights + first * nv);
    const int each = 4 / nv, all = (int)(padded_sums(v_dim) / TILE_ROWS), steps = (last - first) / TILE_PAIRS;
    const int64_t stride = BLOCK * sizeof(bf16_t);
    for (int i = 0; i < all;) {
        const int num = i + each <= all ? each : 1;
        const char *rows[4];
        for (int n = 0; n < 4; n++) rows[n] = values + (i + n) * TILE_ROWS * stride;
        char *sums = (char *)(out + i * TILE_ROWS * nv);
        if (num == each)
            multiply(each, nv, 1, rows, stride, columns, steps, sums, sizeof(VF) * nv, block->ahead);
        else
            multiply(1, nv, 1, rows, stride, columns, steps, sums, sizeof(VF) * nv, block->ahead);
        i += num;
    }
}

#else

enum {
    NAME(keys_of_1) = FULL == 16 ? 12 : 8,
    NAME(keys_of_2) = FULL == 16 ? 8 : 4,
    NAME(dims_of_1) = FULL == 16 ? 16 : 8,
    NAME(dims_of_2) = FULL == 16 ? 8 : 4
};

/* Of `nk` keys and `nv` vectors of lanes. */
ALWAYS_INLINE void NAME(score_keys)(const int nk, const int nv, const NAME(elements) *query, const NAME(element) *keys,
                                    int64_t steps, float scale, VF *scores) {
    const NAME(element) * key[12];
    VF sum[12][2];
#pragma GCC unroll 12
    for (int n = 0; n < nk; n++) {
        key[n] = keys + n * steps;
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) sum[n][v] = (VF){0};
    }
    for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 12
        for (int n = 0; n < nk; n++) {
            const NAME(element) x = key[n][i];
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++) sum[n][v] = DOT(sum[n][v], query[i * nv + v], x);
        }
    }
#pragma GCC unroll 12
    for (int n = 0; n < nk; n++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) scores[n * nv + v] = sum[n][v] * scale;
}

/* Of `nd` numbers of values. */
ALWAYS_INLINE void NAME(weigh_dims)(const int nd, const int nv, const NAME(elements) *weights,
                                    const NAME(element) *values, int64_t v_dim, int from, int to, const VF *decay,
                                    VF *out) {
    VF sum[16][2];
#pragma GCC unroll 16
    for (int n = 0; n < nd; n++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) sum[n][v] = out[n * nv + v] * decay[v];
    for (int i = from; i < to; i++) {
        const NAME(element) *value = values + i * v_dim;
#pragma GCC unroll 16
        for (int n = 0; n < nd; n++) {
            const NAME(element) x = value[n];
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++) sum[n][v] = DOT(sum[n][v], weights[i * nv + v], x);
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < nd; n++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) out[n * nv + v] = sum[n][v];
}

ALWAYS_INLINE void NAME(score)(const int nv, const block_t *block, VF *scores) {
    const int nk = nv == 2 ? NAME(keys_of_2) : NAME(keys_of_1), to = block->to;
    const int64_t steps = num_steps(PAIRS, block->layer->key.dim);
    const NAME(elements) *query = (const NAME(elements) *)(block->scratch->query + steps * block->group->offset);
    const NAME(element) *rows = (const NAME(element) *)block->scratch->keys;
    const float scale = PAIRS ? 1.0f : block->how->scale * LOG2E;
    int n = block->from;
    for (; n + nk <= to; n += nk) {
        fetch(block->ahead, block->ahead->lines * nk / 2 + 1);
        NAME(score_keys)(nk, nv, query, rows + n * steps, steps, scale, scores + n * nv);
    }
    for (; n + 4 <= to; n += 4) NAME(score_keys)(4, nv, query, rows + n * steps, steps, scale, scores + n * nv);
    for (; n < to; n++) NAME(score_keys)(1, nv, query, rows + n * steps, steps, scale, scores + n * nv);
}

ALWAYS_INLINE void NAME(weigh)(const int nv, const block_t *block, int first, int last, int changed, const VF *decay,
                               const NAME(elements) *weights, VF *out) {
    const int nd = nv == 2 ? NAME(dims_of_2) : NAME(dims_of_1);
    const int64_t v_dim = block->layer->value.dim;
    const NAME(element) *values = (const NAME(element) *)block->scratch->values;
    int64_t d = 0;
    (void)changed;
    for (; d + nd <= v_dim; d += nd) {
        fetch(block->ahead, block->ahead->lines * BLOCK * nd / (2 * v_dim) + 1);
        NAME(weigh_dims)(nd, nv, weights, values + d, v_dim, first, last, decay, out + d * nv);
    }
    for (; d + 4 <= v_dim; d += 4)
        NAME(weigh_dims)(4, nv, weights, values + d, v_dim, first, last, decay, out + d * nv);
    for (; d < v_dim; d++) NAME(weigh_dims)(1, nv, weights, values + d, v_dim, first, last, decay, out + d * nv);
}

#endif

/* Caps, biases and masks of scores, which `scale` makes those of the model times log2(e). */
ALWAYS_INLINE void NAME(adjust)(const int nv, const block_t *block, int masked, float scale, VF *scores) {
    const int64_t offset = block->group->offset;
    const VI *position = (const VI *)(block->scratch->position + offset);
    const VI *low = (const VI *)(block->scratch->low + offset);
    const VF *slope = (const VF *)(block->scratch->slope + offset);
    const trivet_attention_scores *how = block->how;
    for (int n = block->from; n < block->to; n++) {
        const int32_t place = block->keys->first + n;
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) {
            VF score = scores[n * nv + v] * scale;
            if (how->softcap != 0.0f) score = VF_(_cap)(score, how->softcap * LOG2E);
            if (how->slopes) score += slope[v] * __builtin_convertvector(place - position[v], VF);
            if (masked)
                score = VF_(_select)((position[v] >= place) & (low[v] <= place), score,
                                     VF_(_splat)(PAIRS ? -INFINITY : HIDDEN));
            scores[n * nv + v] = score;
        }
    }
}

#if PAIRS

/* Weights of keys from scores, which `scale` makes those of the model times log2(e), and which are -infinity where a
 * query does not see a key; pairs of weights first … last - 1 that are of no keys become zeros. Updates maxima and
 * sums, and sets `decay` to what earlier sums are to be multiplied by; returns whether that is anything but 1.
 *
 * The maximum that sums are relative to stays while no score is far above it: then nothing becomes too large, and
 * earlier sums can stay as they are. Whether it does is up to the scores of the lane alone. */
ALWAYS_INLINE int NAME(soften)(const int nv, const block_t *block, int first, int last, float scale, VF *scores,
                               NAME(elements) *weights, VF *most, VF *total, VF *decay) {
    const int from = block->from, to = block->to;
    VF top[2][4], sum[2][2], base[2];
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) top[v][i] = VF_(_splat)(-INFINITY);
        /* What the first key and the last one are paired with. */
        if (from % 2) scores[(from - 1) * nv + v] = top[v][0];
        if (to % 2) scores[to * nv + v] = top[v][0];
    }
    int n = from;
    for (; n + 4 <= to; n += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++) top[v][i] = VF_(_max)(scores[(n + i) * nv + v], top[v][i]);
    for (; n < to; n++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) top[v][0] = VF_(_max)(scores[n * nv + v], top[v][0]);
    int changed = 0;
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) {
        const VF largest = VF_(_max)(VF_(_max)(top[v][0], top[v][1]), VF_(_max)(top[v][2], top[v][3])) * scale;
        const VI far = largest > most[v] + FAR_ABOVE;
        const VF now = VF_(_select)(far, largest, most[v]);
        changed |= VF_(_any)(far);
        decay[v] = VF_(_exp2)(most[v] - now);
        sum[v][0] = sum[v][1] = (VF){0};
        most[v] = now;
        base[v] = -now;
    }
    const int begin = from / 2, end = (to + 1) / 2;
    for (int i = first; i < begin; i++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) weights[i * nv + v] = (VI){0};
    for (int i = begin; i < end; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) {
            const VF *score = scores + 2 * i * nv + v;
            const VF even = VF_(_rough_exp2)(VF_(_add)(base[v], score[0], VF_(_splat)(scale)));
            const VF odd = VF_(_rough_exp2)(VF_(_add)(base[v], score[nv], VF_(_splat)(scale)));
            sum[v][0] += even, sum[v][1] += odd;
            weights[i * nv + v] = VF_(_rough_pair)(even, odd);
        }
        if (HAS_TILES) fetch(block->ahead, FETCH_SOFTEN);
    }
    for (int i = end; i < last; i++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) weights[i * nv + v] = (VI){0};
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) total[v] = VF_(_add)(sum[v][0] + sum[v][1], total[v], decay[v]);
    return changed;
}

#else

/* Weights of keys from scores; updates maxima and sums, and sets `decay` to what earlier sums are to be multiplied
 * by. */
ALWAYS_INLINE void NAME(soften)(const int nv, int masked, int from, int to, const VF *scores, NAME(elements) *weights,
                                VF *most, VF *total, VF *decay) {
    VF top[2], sum[2];
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) top[v] = most[v];
    for (int n = from; n < to; n++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) top[v] = VF_(_max)(scores[n * nv + v], top[v]);
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) {
        decay[v] = VF_(_exp2)(most[v] - top[v]);
        sum[v] = (VF){0};
        most[v] = top[v];
    }
    for (int n = from; n < to; n++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) {
            const VF score = scores[n * nv + v];
            VF weight = VF_(_exp2)(score - top[v]);
            if (masked) weight = (VF)((VI)weight & (score != HIDDEN));
            sum[v] += weight;
            weights[n * nv + v] = weight;
        }
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) total[v] = VF_(_add)(sum[v], total[v], decay[v]);
}

#endif

#if PAIRS

/* Weights of the block's keys from its scores; those of pairs `first` … `last` - 1 are to be multiplied with values.
 * For the rest see NAME(soften). */
ALWAYS_INLINE int NAME(rate)(const int nv, const block_t *block, VF *scores, NAME(elements) *weights, VF *most,
                             VF *total, VF *decay, int *first, int *last) {
    const group_t *group = block->group;
    const trivet_attention_scores *how = block->how;
    const int from = block->from, to = block->to;
    const int masked = block->keys->first + from < group->all_low || block->keys->first + to > group->all_high;
    /* Scores are scaled on their way to weights, and maxima with them, where nothing comes in between. */
    const float scale = how->scale * LOG2E;
    const int plain = how->softcap == 0.0f && !how->slopes && scale > 0.0f;
    *first = HAS_TILES ? from / TILE_INPUTS * TILE_PAIRS : from / 2;
    *last = HAS_TILES ? (to + TILE_INPUTS - 1) / TILE_INPUTS * TILE_PAIRS : (to + 1) / 2;
    if (masked || !plain) NAME(adjust)(nv, block, masked, plain ? 1.0f : scale, scores);
    return NAME(soften)(nv, block, *first, *last, plain ? scale : 1.0f, scores, weights, most, total, decay);
}

#endif

ALWAYS_INLINE void NAME(block)(const int nv, const block_t *block, float *state) {
    VF *scores = (VF *)block->scratch->scores;
    NAME(elements) *weights = (NAME(elements) *)block->scratch->weights;
    VF *out = (VF *)state, *most = out + padded_sums(block->layer->value.dim) * nv, *total = most + nv, decay[2];
    NAME(score)(nv, block, scores);
#if PAIRS
    int first, last;
    const int changed = NAME(rate)(nv, block, scores, weights, most, total, decay, &first, &last);
    NAME(weigh)(nv, block, first, last, changed, decay, weights, out);
#else
    const group_t *group = block->group;
    const trivet_attention_scores *how = block->how;
    const int from = block->from, to = block->to;
    const int masked = block->keys->first + from < group->all_low || block->keys->first + to > group->all_high;
    if (masked || how->softcap != 0.0f || how->slopes) NAME(adjust)(nv, block, masked, 1.0f, scores);
    if (masked)
        NAME(soften)(nv, 1, from, to, scores, weights, most, total, decay);
    else
        NAME(soften)(nv, 0, from, to, scores, weights, most, total, decay);
    NAME(weigh)(nv, block, from, to, 1, decay, weights, out);
#endif
}

static void NAME(block_1)(const block_t *block, float *state) { NAME(block)(1, block, state); }

#if N == FULL
static void NAME(block_2)(const block_t *block, float *state) { NAME(block)(2, block, state); }
#endif

#if !PAIRS
ALWAYS_INLINE void NAME(merge)(const int nv, int64_t v_dim, float *state, const float *part) {
    VF *out = (VF *)state, *most = out + padded_sums(v_dim) * nv, *total = most + nv;
    const VF *part_out = (const VF *)part, *part_most = part_out + padded_sums(v_dim) * nv;
    const VF *part_total = part_most + nv;
    VF mine[2], others[2];
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) {
        const VF top = VF_(_max)(most[v], part_most[v]);
        mine[v] = VF_(_exp2)(most[v] - top);
        others[v] = VF_(_exp2)(part_most[v] - top);
        most[v] = top;
        total[v] = VF_(_add)(total[v] * mine[v], part_total[v], others[v]);
    }
    for (int64_t d = 0; d < v_dim; d++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++)
            out[d * nv + v] = VF_(_add)(out[d * nv + v] * mine[v], part_out[d * nv + v], others[v]);
}

static void NAME(merge_1)(int64_t v_dim, float *state, const float *part) { NAME(merge)(1, v_dim, state, part); }

#if N == FULL
static void NAME(merge_2)(int64_t v_dim, float *state, const float *part) { NAME(merge)(2, v_dim, state, part); }
#endif
#endif

#undef JOIN_
#undef JOIN
#undef VF
#undef VI
#undef VF_
#undef DOT
#undef N
#undef PAIRS
#undef NAME
