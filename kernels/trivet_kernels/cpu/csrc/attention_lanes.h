/* A unit's queries into lanes, and its results out of them. Part of attention_task.c. */

#if HAS_PAIRS

/* Which of 32 numbers from `first` on there are, of `size`. */
static inline __mmask32 which(int64_t first, int64_t size) {
    if (first >= size) return 0;
    return size - first >= 32 ? 0xffffffffu : (__mmask32)((1u << (size - first)) - 1);
}

/* Queries of bfloat16 as pairs, [steps][lanes]; `queries` are NULL in lanes without one. Half a vector of lanes has
 * twice as many numbers turned at once. */
static void load_pairs(const char *const *queries, int lanes, int64_t dim, int64_t steps, int32_t *to) {
    const int width = lanes < 16 ? lanes : 16, at_once = 16 / width;
    for (int first = 0; first < lanes; first += width)
        for (int64_t step = 0; step < steps; step += 16 * at_once) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++) {
                const char *query = queries[first + i % width];
                const int64_t begin = 2 * step + i / width * 32;
                const __mmask32 there = query ? which(begin, dim) : 0;
                pairs[i] = _mm512_maskz_loadu_epi16(there, there ? query + 2 * begin : NULL);
            }
            turn(pairs);
            for (int64_t i = 0; i < 16 * at_once && step + i < steps; i++) {
                int32_t *row = to + (step + i) * lanes + first;
                if (width == 16)
                    _mm512_store_si512(row, pairs[i]);
                else if (i < 16)
                    _mm256_store_si256((__m256i *)row, _mm512_castsi512_si256(pairs[i]));
                else
                    _mm256_store_si256((__m256i *)row, _mm512_extracti64x4_epi64(pairs[i - 16], 1));
            }
        }
}

/* sums * factors in bfloat16, every lane to a place of its own, which is NULL in lanes without a query. */
static void store_pairs(const float *sums, const float *factors, int lanes, int64_t v_dim, char *const *to) {
    const int width = lanes < 16 ? lanes : 16, at_once = 16 / width;
    const int64_t padded = padded_sums(v_dim);
    for (int first = 0; first < lanes; first += width)
        for (int64_t d = 0; d < v_dim; d += 32 * at_once) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++) {
                const float *sum = sums + (d + 2 * i) * lanes + first, *factor = factors + first;
                if (d + 2 * i >= padded) {
                    pairs[i] = _mm512_setzero_si512();
                } else if (width == 16) {
                    pairs[i] = (__m512i)vf16_pair(*(const vf16 *)sum * *(const vf16 *)factor,
                                                  *(const vf16 *)(sum + lanes) * *(const vf16 *)factor);
                } else {
                    const vf8 scale = *(const vf8 *)factor, *low = (const vf8 *)sum, *high = low + 32;
                    pairs[i] = _mm512_castsi256_si512((__m256i)vf8_pair(low[0] * scale, low[1] * scale));
                    if (d + 2 * i + 32 < padded)
                        pairs[i] = _mm512_inserti64x4(pairs[i], (__m256i)vf8_pair(high[0] * scale, high[1] * scale), 1);
                }
            }
            turn(pairs);
            for (int i = 0; i < 16; i++) {
                const int64_t begin = d + i / width * 32;
                const __mmask32 there = which(begin, v_dim);
                if (there && to[first + i % width])
                    _mm512_mask_storeu_epi16(to[first + i % width] + 2 * begin, there, pairs[i]);
            }
        }
}

#endif

/* One query into its lane. */
static void load_query(const call_t *call, const char *query, int64_t lanes, float *to) {
    const int64_t dim = call->layer->key.dim;
    if (call->layer->dtype == TRIVET_F32)
        for (int64_t i = 0; i < dim; i++) to[i * lanes] = ((const float *)query)[i];
    else
        for (int64_t i = 0; i < dim; i++) to[i * lanes] = bf16_to_float(((const bf16_t *)query)[i]);
}

/* Lay the unit's queries out in lanes, with what each sees. Lanes without a query repeat the last one's place. */
static void load_queries(const call_t *call, const plan_t *plan, const unit_t *unit, const scratch_t *scratch) {
    const int64_t dim = call->layer->key.dim, item = call->layer->dtype == TRIVET_BF16 ? 2 : 4;
    const int64_t steps = num_steps(in_pairs(call), dim);
    const int64_t start = call->step->query_start[unit->row], begin = first_position(call->step, unit->row);
    int64_t token = 0, head = 0;
    int32_t position = 0, low = 0;
    float slope = 0.0f;
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        const char *queries[2 * FULL] = {0};
        float *to = scratch->query + steps * group->offset;
        if (g == 0 || group->head != group[-1].head)
            token = plan->first / call->per_head, head = plan->first % call->per_head;
        for (int64_t lane = 0; lane < group->lanes; lane++) {
            if (lane < group->count) {
                const int64_t number = group->head * call->per_head + head;
                const int64_t at = (start + token) * call->query.token + number * call->query.head;
                queries[lane] = call->query.data + at * item;
                if (head == 0 || lane == 0) {
                    position = (int32_t)(begin + token);
                    low = (int32_t)first_seen(position, call->how.window);
                }
                if (call->how.slopes) slope = call->how.slopes[number] * LOG2E;
                if (++head == call->per_head) head = 0, token++;
            }
            scratch->position[group->offset + lane] = position;
            scratch->low[group->offset + lane] = low;
            scratch->slope[group->offset + lane] = slope;
        }
#if HAS_PAIRS
        if (in_pairs(call)) {
            load_pairs(queries, group->lanes, dim, steps, (int32_t *)to);
            continue;
        }
#endif
        if (group->count < group->lanes) memset(to, 0, (size_t)(dim * group->lanes) * sizeof *to);
        for (int lane = 0; lane < group->count; lane++) load_query(call, queries[lane], group->lanes, to + lane);
    }
}

/* The results of a group's lanes, whose sums are to be multiplied by `factors`, to their places. */
static void store_lanes(const call_t *call, const group_t *group, const float *sums, const float *factors,
                        char *const *to) {
    const int64_t v_dim = call->layer->value.dim;
#if HAS_TILES
    if (are_few(call, group->kind)) {
        store_few(sums, factors, group->count, v_dim, to);
        return;
    }
#endif
#if HAS_PAIRS
    if (in_pairs(call)) {
        store_pairs(sums, factors, group->lanes, v_dim, to);
        return;
    }
#endif
    for (int lane = 0; lane < group->count; lane++)
        for (int64_t d = 0; d < v_dim; d++) {
            const float value = sums[d * group->lanes + lane] * factors[lane];
            if (call->layer->dtype == TRIVET_F32)
                ((float *)to[lane])[d] = value;
            else
                ((bf16_t *)to[lane])[d] = float_to_bf16(value);
        }
}

static void store(const call_t *call, const plan_t *plan, const unit_t *unit, const float *state) {
    const int64_t v_dim = call->layer->value.dim, start = call->step->query_start[unit->row];
    const int64_t item = call->layer->dtype == TRIVET_BF16 ? 2 : 4;
    int64_t token = 0, head = 0;
    for (int g = 0; g < unit->num_groups; g++) {
        const group_t *group = &unit->groups[g];
        if (g == 0 || group->head != group[-1].head)
            token = plan->first / call->per_head, head = plan->first % call->per_head;
        const float *sums = state + STATE_SIZE(group->offset, v_dim);
        const float *tops = sums + padded_sums(v_dim) * group->lanes, *totals = tops + group->lanes;
        float factors[2 * FULL] __attribute__((aligned(64))) = {0};
        char *to[2 * FULL] = {0};
        for (int lane = 0; lane < group->count; lane++) {
            const int64_t number = group->head * call->per_head + head;
            float total = totals[lane], factor = 1.0f;
            if (call->how.sinks) {
                const float sink = call->how.sinks[number] * LOG2E, top = sink > tops[lane] ? sink : tops[lane];
                factor = exp2f(tops[lane] - top);
                total = total * factor + exp2f(sink - top);
            }
            factors[lane] = factor / total;
            to[lane] = call->out + ((start + token) * call->num_heads + number) * v_dim * item;
            if (++head == call->per_head) head = 0, token++;
        }
        store_lanes(call, group, sums, factors, to);
    }
}
