/* Drawing a token from each row: cuts by min-p, top-k and top-p, then the largest sum of a logit and its noise. The
 * outcome is trivet_kernels.reference.sampling's, token for token. */
#include "sampling_row.h"

/* Parameters of a row; the order of the fields is that of trivet_kernels.cpu.sampling. */
typedef struct {
    const void *x;
    int64_t dtype, top_k, position;
    uint64_t seed;
    double top_p, log_min_p; /* log_min_p: -inf keeps all */
    float temperature;       /* 0: the likeliest token */
    int32_t id;              /* the outcome */
    float highest;
    float unused;
} draw_t;

typedef struct {
    double *smallest, *reach; /* [groups] noise of the groups that may hold a survivor */
    int32_t *group, *member;
} noise_t;

/* The smallest float32 number that is not below a bound. */
INLINE float at_least_bound(double bound) {
    float rounded = (float)bound;
    return (double)rounded < bound ? nextafterf(rounded, INFINITY) : rounded;
}

/* A value, at least `floor`, such that those from it on are certain to weigh `share`. Of a group whose largest value
 * reaches it the others may all have just less. */
INLINE float least_by_mass(const row_t *r, float floor, int64_t share) {
    float enough = floor, distance = 32.0f;
    for (float step = 16.0f; step > 0.1f; step *= 0.5f) {
        float least = r->highest - (distance - step);
        if (least <= floor) {
            distance -= step;
            continue;
        }
        int64_t own = weight_of(least - r->highest), mass = 0;
        /* A few units for what rounding may make of weights that are nearly equal. */
        int64_t below = (GROUP - 1) * (own + 4);
        for (int64_t group = 0; group < r->groups; group++) {
            int64_t certain = r->masses[group] - below;
            certain = certain > own ? certain : own;
            mass += r->maxima[group] >= least ? certain : 0;
        }
        if (mass >= share) {
            enough = least;
            distance -= step;
        }
    }
    return enough;
}

/* The rank of the last token that the cuts leave, 0 for one that nothing has if they leave all from `floor` on. */
INLINE uint64_t last_survivor(row_t *r, const draw_t *d, float floor, float *scratch, int dtype) {
    const int nucleus = d->top_p < 1.0, cut = d->top_k > 0 && d->top_k < r->groups * GROUP;
    if (cut) {
        float least = -INFINITY;
        if (d->top_k < r->groups) {
            memcpy(scratch, r->maxima, (size_t)r->groups * sizeof *scratch);
            least = trivet_nth_largest(scratch, r->groups, d->top_k);
        }
        int64_t count = list_from(r, least > floor ? least : floor, nucleus, dtype), total = 0;
        if (!nucleus) return count < d->top_k ? 0 : trivet_last_rank(r->items, count, d->top_k);
        if (count > d->top_k) {
            trivet_order(r->items, count);
            count = d->top_k;
        }
        for (int64_t i = 0; i < count; i++) total += r->items[i].weight;
        return trivet_last_rank(r->items, count, (int64_t)ceil(d->top_p * (double)total));
    }
    if (!nucleus) return 0;
    int64_t total = 0;
    for (int64_t group = 0; group < r->groups; group++) {
        int near = r->maxima[group] >= floor && r->maxima[group] - r->highest > FAR;
        r->masses[group] = near ? group_mass(r, group, floor, dtype) : 0;
        total += r->masses[group];
    }
    int64_t share = (int64_t)ceil(d->top_p * (double)total);
    return trivet_last_rank(r->items, list_from(r, least_by_mass(r, floor, share), 1, dtype), share);
}

INLINE double noisy(float value, double smallest, double excess) { return (double)value - exact_log(smallest + excess); }

INLINE int32_t likeliest(const row_t *r, int dtype) {
    for (int64_t group = 0; group < r->groups; group++) {
        if (r->maxima[group] != r->highest) continue;
        int64_t end = (group + 1) * GROUP < r->size ? (group + 1) * GROUP : r->size;
        for (int64_t id = group * GROUP; id < end; id++)
            if (load_one(r->x, id, dtype) / r->temperature == r->highest) return (int32_t)id;
    }
    return 0;
}

/* Draws among the tokens whose rank is `last` or more. */
INLINE int32_t draw_row(const row_t *r, const draw_t *d, float floor, uint64_t last, const noise_t *n, int dtype) {
    const float least = last ? value_of((uint32_t)(last >> 32)) : floor;
    const uint32_t position = (uint32_t)d->position;
    int64_t count = 0;
    for (int64_t group = 0; group < r->groups; group++)
        if (r->maxima[group] >= least) n->group[count++] = (int32_t)group;
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[2];
        philox((uint32_t)n->group[i], position, d->seed, FOR_GROUP, words);
        n->smallest[i] = (double)words[0];
        n->member[i] = (int32_t)(words[1] % GROUP);
    }
    for (int64_t i = 0; i < count; i++) {
        n->smallest[i] = -exact_log((n->smallest[i] + 0.5) / 4294967296.0) / GROUP;
        n->reach[i] = -exact_log(n->smallest[i]);
    }
    /* What the largest sum is at least: that of the tokens with the most noise in their groups. */
    double best = -INFINITY;
    int64_t winner = NO_ID;
    for (int64_t i = 0; i < count; i++) {
        int64_t id = (int64_t)n->group[i] * GROUP + n->member[i];
        if ((double)r->maxima[n->group[i]] + n->reach[i] < best || id >= r->size) continue;
        float value = load_one(r->x, id, dtype) / r->temperature;
        double sum = (double)value + n->reach[i];
        if (value < least || rank_of(value, id) < last || sum < best) continue;
        if (sum > best || id < winner) winner = id;
        best = sum;
    }
    for (int64_t i = 0; i < count; i++) {
        if ((double)r->maxima[n->group[i]] + n->reach[i] < best) continue;
        union {
            vec_t vectors[GROUP / LANES];
            float values[GROUP];
        } u;
        group_values(r, n->group[i], u.vectors, dtype);
        for (int64_t place = 0; place < GROUP; place++) {
            float value = u.values[place];
            int64_t id = (int64_t)n->group[i] * GROUP + place;
            if (value < least || (double)value + n->reach[i] < best) continue;
            if (id >= r->size || rank_of(value, id) < last) continue;
            uint32_t words[2];
            philox((uint32_t)id, position, d->seed, FOR_TOKEN, words);
            double sum = noisy(value, n->smallest[i], place == n->member[i] ? 0.0 : exponential(words[0]));
            if (sum < best) continue;
            if (sum > best || id < winner) winner = id;
            best = sum;
        }
    }
    return (int32_t)winner;
}

INLINE void sample_row(row_t *r, draw_t *d, float *scratch, const noise_t *noise, int dtype) {
    r->x = d->x;
    r->dtype = dtype;
    r->temperature = d->temperature > 0.0f ? d->temperature : 1.0f;
    find_maxima(r, dtype);
    d->highest = r->highest;
    d->id = 0;
    if (!isfinite(r->highest)) return;
    if (d->temperature <= 0.0f) {
        d->id = likeliest(r, dtype);
        return;
    }
    float floor = isinf(d->log_min_p) ? -3.402823466e38f : at_least_bound((double)r->highest + d->log_min_p);
    uint64_t last = last_survivor(r, d, floor, scratch, dtype);
    d->id = draw_row(r, d, floor, last, noise, dtype);
}

/* Draws from each of `rows` rows of `size` logits. Returns 0, or 1 if there is no memory. */
int64_t trivet_draw(draw_t *draws, int64_t rows, int64_t size, int64_t num_threads) {
    const int64_t groups = (size + GROUP - 1) / GROUP;
    const size_t per_group = sizeof(int64_t) + 2 * sizeof(double) + 2 * sizeof(int32_t) + 2 * sizeof(float);
    int64_t failed = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1) reduction(| : failed)
    {
        char *memory = malloc((size_t)size * sizeof(item_t) + (size_t)groups * per_group);
        if (!memory) failed = 1;
        item_t *items = (item_t *)memory;
        int64_t *masses = (int64_t *)(items + size);
        double *numbers = (double *)(masses + groups);
        int32_t *places = (int32_t *)(numbers + 2 * groups);
        float *values = (float *)(places + 2 * groups);
        row_t row = {.size = size, .groups = groups, .maxima = values, .masses = masses, .items = items};
        const noise_t noise = {numbers, numbers + groups, places, places + groups};
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < rows; i++) {
            if (!memory) continue;
            if (draws[i].dtype == TRIVET_F32)
                sample_row(&row, &draws[i], values + groups, &noise, TRIVET_F32);
            else
                sample_row(&row, &draws[i], values + groups, &noise, TRIVET_BF16);
        }
        free(memory);
    }
    return failed;
}
