/* See scratch.h. */
#include "scratch.h"

#include <pthread.h>
#include <stdlib.h>

enum { PAGE = 4096 };

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

typedef struct {
    size_t size[SCRATCH_USES];
    char *data[SCRATCH_USES];
} memory_t;

static void free_memory(void *pointer) {
    memory_t *memory = pointer;
    for (int use = 0; use < SCRATCH_USES; use++) free(memory->data[use]);
    free(memory);
}

static void make_key(void) { pthread_key_create(&key, free_memory); }

char *trivet_scratch(int use, size_t size) {
    pthread_once(&once, make_key);
    memory_t *memory = pthread_getspecific(key);
    if (!memory) {
        memory = calloc(1, sizeof *memory);
        if (!memory || pthread_setspecific(key, memory)) {
            free(memory);
            return NULL;
        }
    }
    if (memory->size[use] < size) {
        free(memory->data[use]);
        size = (size + PAGE - 1) / PAGE * PAGE;
        memory->data[use] = aligned_alloc(PAGE, size);
        memory->size[use] = memory->data[use] ? size : 0;
    }
    return memory->data[use];
}
