/* How threads divide pieces of work among each other. */
#ifndef TRIVET_SHARES_H
#define TRIVET_SHARES_H

#include <stdint.h>

/* The pieces that a thread begins with, from `next` on; others take what is left when they have no more of their own. */
typedef struct {
    int64_t next, end;
    char pad[48];
} share_t;

static inline void divide_shares(share_t *shares, int64_t num, int64_t pieces) {
    for (int64_t i = 0; i < num; i++) shares[i].next = pieces * i / num, shares[i].end = pieces * (i + 1) / num;
}

/* Up to `count` pieces that nobody has taken, first of the thread's own share; none if there are no more. `end` is that
 * of the share they belong to. */
static inline int64_t take(share_t *shares, int64_t num, int64_t own, int64_t count, int64_t *first, int64_t *end) {
    for (int64_t i = 0; i < num; i++) {
        share_t *share = &shares[(own + i) % num];
        if (__atomic_load_n(&share->next, __ATOMIC_RELAXED) >= share->end) continue;
        *first = __atomic_fetch_add(&share->next, count, __ATOMIC_RELAXED);
        *end = share->end;
        if (*first < share->end) return share->end - *first < count ? share->end - *first : count;
    }
    return 0;
}

#endif
