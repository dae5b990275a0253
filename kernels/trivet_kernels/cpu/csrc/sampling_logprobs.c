/* Log-probabilities of tokens and of the most likely ones. */
#include "sampling_row.h"

/* A row; the order of the fields is that of trivet_kernels.cpu.sampling. */
typedef struct {
    const void *x;
    int64_t dtype, token;
    float logprob; /* the outcome, of the token */
    int32_t rank;
} logprob_t;

typedef struct {
    int64_t size, width, count; /* ids that are ranked, that share the probability, and how many are listed */
    int32_t *ids;               /* [rows, count] */
    float *values;
} lists_t;

INLINE int64_t all_mass(const row_t *r, int dtype) {
    int64_t total = 0;
    for (int64_t group = 0; group < r->groups; group++)
        if (r->maxima[group] - r->highest > FAR) total += group_mass(r, group, -INFINITY, dtype);
    return total;
}

INLINE void logprobs_row(row_t *r, row_t *rest, logprob_t *p, const lists_t *l, int64_t index, float *scratch,
                         int dtype) {
    int32_t *ids = l->ids + index * l->count;
    float *values = l->values + index * l->count;
    r->x = p->x;
    find_maxima(r, dtype);
    if (rest->size) {
        rest->x = (const char *)p->x + l->size * size_of(dtype);
        find_maxima(rest, dtype);
        r->highest = r->highest != r->highest || rest->highest > r->highest ? rest->highest : r->highest;
        if (rest->highest != rest->highest) r->highest = NAN;
        rest->highest = r->highest;
    }
    float chosen = load_one(p->x, p->token, dtype), above = nextafterf(chosen, INFINITY);
    if (!isfinite(r->highest)) {
        p->logprob = NAN;
        p->rank = 1;
        for (int64_t i = 0; i < l->count; i++) {
            ids[i] = (int32_t)i;
            values[i] = NAN;
        }
        return;
    }
    int64_t total = all_mass(r, dtype) + (rest->size ? all_mass(rest, dtype) : 0), ahead = 0;
    double log_total = exact_log((double)total / ONE);
    p->logprob = (float)((double)(chosen - r->highest) - log_total);
    for (int64_t group = 0; group < r->groups; group++) {
        if (r->maxima[group] <= chosen) continue;
        vec_t group_of[GROUP / LANES];
        group_values(r, group, group_of, dtype);
        for (int i = 0; i < GROUP / LANES; i++) ahead += __builtin_popcount(lanes_from(group_of[i], above));
    }
    p->rank = (int32_t)ahead + 1;
    if (!l->count) return;
    float least = -INFINITY;
    if (l->count < r->groups) {
        memcpy(scratch, r->maxima, (size_t)r->groups * sizeof *scratch);
        least = trivet_nth_largest(scratch, r->groups, l->count);
    }
    trivet_order(r->items, list_from(r, least, 0, dtype));
    for (int64_t i = 0; i < l->count; i++) {
        ids[i] = NO_ID - (int32_t)(r->items[i].rank & 0xffffffffu);
        values[i] = (float)((double)(value_of((uint32_t)(r->items[i].rank >> 32)) - r->highest) - log_total);
    }
}

/* For each of `rows` rows of `width` logits, of which the first `size` ids are ranked: the logprob and rank of its token,
 * and the ids and logprobs of the `count` <= size most likely ones. Returns 0, or 1 if there is no memory. */
int64_t trivet_logprobs(logprob_t *tokens, int32_t *ids, float *values, int64_t rows, int64_t size, int64_t width,
                        int64_t count, int64_t num_threads) {
    const int64_t groups = (size + GROUP - 1) / GROUP, more = (width - size + GROUP - 1) / GROUP;
    const lists_t lists = {size, width, count, ids, values};
    int64_t failed = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1) reduction(| : failed)
    {
        char *memory = malloc((size_t)size * sizeof(item_t) + (size_t)(2 * groups + more) * sizeof(float));
        if (!memory) failed = 1;
        item_t *items = (item_t *)memory;
        float *maxima = (float *)(items + size);
        row_t row = {.size = size, .groups = groups, .temperature = 1.0f, .maxima = maxima, .items = items};
        row_t rest = {.size = width - size, .groups = more, .temperature = 1.0f, .maxima = maxima + 2 * groups};
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < rows; i++) {
            if (!memory) continue;
            if (tokens[i].dtype == TRIVET_F32)
                logprobs_row(&row, &rest, &tokens[i], &lists, i, maxima + groups, TRIVET_F32);
            else
                logprobs_row(&row, &rest, &tokens[i], &lists, i, maxima + groups, TRIVET_BF16);
        }
        free(memory);
    }
    return failed;
}
