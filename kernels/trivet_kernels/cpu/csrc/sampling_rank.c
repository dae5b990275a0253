/* Finding a place in the ranking of tokens without sorting them all. */
#include "sampling_row.h"

enum { FEW = 24, MANY = 2048, BINS = 2048 };

INLINE void swap(item_t *a, item_t *b) {
    item_t kept = *a;
    *a = *b;
    *b = kept;
}

INLINE uint64_t median(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* Moves what is from a pivot on to the front; returns how many. No two ranks are equal, so neither part is empty. */
INLINE int64_t divide(item_t *items, int64_t count) {
    uint64_t pivot = median(items[0].rank, items[count / 2].rank, items[count - 1].rank);
    int64_t front = 0;
    for (int64_t i = 0; i < count; i++)
        if (items[i].rank >= pivot) swap(&items[front++], &items[i]);
    return front;
}

INLINE void insert_all(item_t *items, int64_t count) {
    for (int64_t i = 1; i < count; i++)
        for (int64_t j = i; j > 0 && items[j].rank > items[j - 1].rank; j--) swap(&items[j], &items[j - 1]);
}

void trivet_order(item_t *items, int64_t count) {
    while (count > FEW) {
        int64_t front = divide(items, count);
        trivet_order(items + front, count - front);
        count = front;
    }
    insert_all(items, count);
}

/* Leaves of many items those of the bin of ranks in which the first ones come to weigh `share`, less what is before it;
 * returns how many, 0 if all weigh less. No branch depends on an item. */
static int64_t narrow(item_t *items, int64_t count, int64_t *share, uint64_t *lowest) {
    int64_t bins[BINS] = {0};
    uint64_t high = 0, low = ~0ull;
    for (int64_t i = 0; i < count; i++) {
        high = items[i].rank > high ? items[i].rank : high;
        low = items[i].rank < low ? items[i].rank : low;
    }
    int shift = 0;
    while ((high - low) >> shift >= BINS) shift++;
    for (int64_t i = 0; i < count; i++) bins[(high - items[i].rank) >> shift] += items[i].weight;
    uint64_t chosen = 0;
    while (chosen < BINS && bins[chosen] < *share) *share -= bins[chosen++];
    *lowest = low;
    int64_t kept = 0;
    for (int64_t i = 0; i < count && chosen < BINS; i++) {
        items[kept] = items[i];
        kept += (high - items[i].rank) >> shift == chosen;
    }
    return kept;
}

uint64_t trivet_last_rank(item_t *items, int64_t count, int64_t share) {
    while (count > MANY) {
        uint64_t lowest;
        count = narrow(items, count, &share, &lowest);
        if (!count) return lowest;
    }
    while (count > FEW) {
        int64_t front = divide(items, count), weight = 0;
        for (int64_t i = 0; i < front; i++) weight += items[i].weight;
        if (weight >= share) {
            count = front;
        } else {
            share -= weight;
            items += front;
            count -= front;
        }
    }
    insert_all(items, count);
    for (int64_t i = 0; i + 1 < count; i++) {
        share -= items[i].weight;
        if (share <= 0) return items[i].rank;
    }
    return items[count - 1].rank;
}

float trivet_nth_largest(float *values, int64_t n, int64_t count) {
    while (n > 1) {
        float a = values[0], b = values[n / 2], c = values[n - 1];
        float low = a < b ? a : b, high = a < b ? b : a, pivot = c < low ? low : c > high ? high : c;
        /* Larger ones to the front, equal ones behind them. */
        int64_t larger_ones = 0, equal = 0;
        for (int64_t i = 0; i < n; i++) {
            float value = values[i];
            if (value > pivot) {
                values[i] = values[larger_ones + equal];
                values[larger_ones + equal] = values[larger_ones];
                values[larger_ones++] = value;
            } else if (value == pivot) {
                values[i] = values[larger_ones + equal];
                values[larger_ones + equal++] = value;
            }
        }
        if (count <= larger_ones) {
            n = larger_ones;
        } else if (count <= larger_ones + equal) {
            return pivot;
        } else {
            count -= larger_ones + equal;
            values += larger_ones + equal;
            n -= larger_ones + equal;
        }
    }
    return values[0];
}
