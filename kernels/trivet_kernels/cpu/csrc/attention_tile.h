/* A group of lanes over one block of keys; included once for every vector and kind of product.
 *
 * N: lanes of a vector. PAIRS: whether a product is of pairs of bfloat16 (an instruction) or of single floats.
 * NAME(x): what functions are called here. */

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

/* scores[n][lane] = scale * query · key n, for `nk` keys and `nv` vectors of lanes. */
ALWAYS_INLINE void NAME(score)(const int nk, const int nv, const NAME(elements) *query, const NAME(element) *keys,
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

/* out[d][lane] = out[d][lane] * decay[lane] + sum over keys of weight[key][lane] * value[key][d], for `nd` d. */
ALWAYS_INLINE void NAME(weigh)(const int nd, const int nv, const NAME(elements) *weights, const NAME(element) *values,
                               int64_t v_dim, int from, int to, const VF *decay, VF *out) {
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

/* Caps, biases and masks of scores that have been multiplied by scale * log2(e). */
ALWAYS_INLINE void NAME(adjust)(const int nv, const group_t *group, const scratch_t *scratch, const keys_t *keys,
                                const scores_t *how, int from, int to, int masked, VF *scores) {
    const VI *position = (const VI *)(scratch->position + group->offset);
    const VI *low = (const VI *)(scratch->low + group->offset);
    const VF *slope = (const VF *)(scratch->slope + group->offset);
    for (int n = from; n < to; n++) {
        const int32_t place = keys->first + n;
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) {
            VF score = scores[n * nv + v];
            if (how->softcap != 0.0f) score = VF_(_cap)(score, how->softcap * LOG2E);
            if (how->slopes) score += slope[v] * __builtin_convertvector(place - position[v], VF);
            if (masked) score = VF_(_select)((position[v] >= place) & (low[v] <= place), score, VF_(_splat)(HIDDEN));
            scores[n * nv + v] = score;
        }
    }
}

/* Weights of keys from scores; updates maxima and sums, and sets `decay` to what earlier sums are to be multiplied by. */
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
        decay[v] = VF_(_exp2)(most[v] - top[v], 0);
        sum[v] = (VF){0};
        most[v] = top[v];
    }
#if PAIRS
    const int last = to - 1;
    for (int i = from / 2; i <= last / 2; i++) {
        const int even = 2 * i >= from, odd = 2 * i + 1 < to;
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) {
            VF a = {0}, b = {0};
            if (even) {
                const VF score = scores[2 * i * nv + v];
                a = VF_(_exp2)(score - top[v], PAIRS);
                if (masked) a = (VF)((VI)a & (score != HIDDEN));
                sum[v] += a;
            }
            if (odd) {
                const VF score = scores[(2 * i + 1) * nv + v];
                b = VF_(_exp2)(score - top[v], PAIRS);
                if (masked) b = (VF)((VI)b & (score != HIDDEN));
                sum[v] += b;
            }
            weights[i * nv + v] = NAME(pair)(a, b);
        }
    }
#else
    for (int n = from; n < to; n++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) {
            const VF score = scores[n * nv + v];
            VF weight = VF_(_exp2)(score - top[v], PAIRS);
            if (masked) weight = (VF)((VI)weight & (score != HIDDEN));
            sum[v] += weight;
            weights[n * nv + v] = weight;
        }
#endif
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) total[v] = VF_(_add)(sum[v], total[v], decay[v]);
}

ALWAYS_INLINE void NAME(block)(const int nv, const int nk, const int nd, const group_t *group,
                               const scratch_t *scratch, const keys_t *keys, const keys_t *ahead, const scores_t *how,
                               const trivet_attention_layer *layer, float *state) {
    const int low = group->low - keys->first, high = group->high - keys->first;
    const int from = low > keys->from ? low : keys->from, to = high < keys->to ? high : keys->to;
    if (from >= to) return;
    const int64_t dim = layer->key.dim, v_dim = layer->value.dim;
    const int64_t steps = PAIRS ? (dim + 1) / 2 : dim;
    const NAME(elements) *query = (const NAME(elements) *)(scratch->query + steps * group->offset);
    const NAME(element) *rows = (const NAME(element) *)scratch->keys;
    const NAME(element) *values = (const NAME(element) *)scratch->values;
    VF *scores = (VF *)scratch->scores;
    NAME(elements) *weights = (NAME(elements) *)scratch->weights;
    const float scale = how->scale * LOG2E;
    int n = from;
    for (; n + nk <= to; n += nk) {
        fetch(ahead, 0, n, n + nk, layer, group->head);
        NAME(score)(nk, nv, query, rows + n * steps, steps, scale, scores + n * nv);
    }
    fetch(ahead, 0, n, BLOCK, layer, group->head);
    for (; n + 4 <= to; n += 4) NAME(score)(4, nv, query, rows + n * steps, steps, scale, scores + n * nv);
    for (; n < to; n++) NAME(score)(1, nv, query, rows + n * steps, steps, scale, scores + n * nv);

    VF *out = (VF *)state, *most = out + v_dim * nv, *total = most + nv, decay[2];
    const int masked = keys->first + from < group->all_low || keys->first + to > group->all_high;
    if (masked || how->softcap != 0.0f || how->slopes)
        NAME(adjust)(nv, group, scratch, keys, how, from, to, masked, scores);
    if (masked)
        NAME(soften)(nv, 1, from, to, scores, weights, most, total, decay);
    else
        NAME(soften)(nv, 0, from, to, scores, weights, most, total, decay);

    const int first = PAIRS ? from / 2 : from, last = PAIRS ? (to + 1) / 2 : to;
    const int each = (int)(BLOCK * nd / v_dim) + 1;
    int64_t d = 0;
    n = 0;
    for (; d + nd <= v_dim; d += nd, n += each) {
        fetch(ahead, 1, n, n + each, layer, group->head);
        NAME(weigh)(nd, nv, weights, values + d, v_dim, first, last, decay, out + d * nv);
    }
    fetch(ahead, 1, n, BLOCK, layer, group->head);
    for (; d + 4 <= v_dim; d += 4) NAME(weigh)(4, nv, weights, values + d, v_dim, first, last, decay, out + d * nv);
    for (; d < v_dim; d++) NAME(weigh)(1, nv, weights, values + d, v_dim, first, last, decay, out + d * nv);
}

#if FULL == 16
enum { NAME(keys_of_1) = 12, NAME(dims_of_1) = 16, NAME(keys_of_2) = 8, NAME(dims_of_2) = 8 };
#else
enum { NAME(keys_of_1) = 8, NAME(dims_of_1) = 8, NAME(keys_of_2) = 4, NAME(dims_of_2) = 4 };
#endif

static void NAME(block_1)(const group_t *group, const scratch_t *scratch, const keys_t *keys,
                          const keys_t *ahead, const scores_t *how, const trivet_attention_layer *layer,
                          float *state) {
    NAME(block)(1, NAME(keys_of_1), NAME(dims_of_1), group, scratch, keys, ahead, how, layer, state);
}

#if N == FULL
static void NAME(block_2)(const group_t *group, const scratch_t *scratch, const keys_t *keys,
                          const keys_t *ahead, const scores_t *how, const trivet_attention_layer *layer,
                          float *state) {
    NAME(block)(2, NAME(keys_of_2), NAME(dims_of_2), group, scratch, keys, ahead, how, layer, state);
}
#endif

#if !PAIRS
ALWAYS_INLINE void NAME(merge)(const int nv, int64_t v_dim, float *state, const float *part) {
    VF *out = (VF *)state, *most = out + v_dim * nv, *total = most + nv;
    const VF *part_out = (const VF *)part, *part_most = part_out + v_dim * nv, *part_total = part_most + nv;
    VF mine[2], others[2];
#pragma GCC unroll 2
    for (int v = 0; v < nv; v++) {
        const VF top = VF_(_max)(most[v], part_most[v]);
        mine[v] = VF_(_exp2)(most[v] - top, 0);
        others[v] = VF_(_exp2)(part_most[v] - top, 0);
        most[v] = top;
        total[v] = VF_(_add)(total[v] * mine[v], part_total[v], others[v]);
    }
    for (int64_t d = 0; d < v_dim; d++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++) out[d * nv + v] = VF_(_add)(out[d * nv + v] * mine[v], part_out[d * nv + v], others[v]);
}

static void NAME(merge_1)(int64_t v_dim, float *state, const float *part) {
    NAME(merge)(1, v_dim, state, part);
}

#if N == FULL
static void NAME(merge_2)(int64_t v_dim, float *state, const float *part) {
    NAME(merge)(2, v_dim, state, part);
}
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
