#include "common.h"

/* How many threads take part when `num_threads` are asked for. */
int64_t trivet_count_threads(int64_t num_threads) {
    int64_t count = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : count)
    count += 1;
    return count;
}
