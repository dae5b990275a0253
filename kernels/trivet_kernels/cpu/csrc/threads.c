#include "common.h"

extern int omp_get_max_threads(void);

/* How many threads a loop has that does not say: the setting of the OpenMP runtime that is in use. */
int64_t trivet_max_threads(void) { return omp_get_max_threads(); }

/* How many threads take part when `num_threads` are asked for. */
int64_t trivet_count_threads(int64_t num_threads) {
    int64_t count = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : count)
    count += 1;
    return count;
}
