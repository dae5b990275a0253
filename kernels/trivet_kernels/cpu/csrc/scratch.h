/* Memory that threads of products keep from call to call. */
#ifndef TRIVET_SCRATCH_H
#define TRIVET_SCRATCH_H

#include <stddef.h>

/* What it is for; each has memory of its own: rows arranged in tiles, sums that wait, rows rounded to eight bits, copies. */
enum { SCRATCH_ARRANGED, SCRATCH_SUMS, SCRATCH_ROUNDED, SCRATCH_COPIED, SCRATCH_USES };

/* `size` bytes of the calling thread for a use, aligned to a page, with whatever was in them; NULL if there is no memory.
 * They are good until the thread asks for more for the same use, or ends. */
__attribute__((visibility("hidden"))) char *trivet_scratch(int use, size_t size);

#endif
