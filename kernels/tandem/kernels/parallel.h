/* Parallel regions on torch's compute threads: its OpenMP library is in the process, and a second pool of threads would
   compete for the same cores. Without the library one thread does all. */

#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdint.h>

typedef void region_fn(void *data);
static void (*open_region)(region_fn *, void *, unsigned threads, unsigned flags);
static int (*thread_number)(void), (*threads_here)(void);
static void (*wait_for_all)(void);

__attribute__((constructor)) static void find_threads(void) {
    void *open = dlsym(RTLD_DEFAULT, "GOMP_parallel"), *number = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    void *count = dlsym(RTLD_DEFAULT, "omp_get_num_threads"), *wait = dlsym(RTLD_DEFAULT, "GOMP_barrier");
    if (!open || !number || !count || !wait) return;
    *(void **)&open_region = open, *(void **)&thread_number = number;
    *(void **)&threads_here = count, *(void **)&wait_for_all = wait;
}

/* Runs `body` on so many threads, or fewer; each asks `thread` and `threads` which it is, of how many. */
static void run_region(region_fn *body, void *data, int64_t threads) {
    if (threads > 1 && open_region) open_region(body, data, (unsigned)threads, 0);
    else body(data);
}

/* So many threads, or fewer where each would compute less than `least` of `numbers`: a region costs microseconds. */
static inline int64_t threads_for(int64_t threads, int64_t numbers, int64_t least) {
    const int64_t useful = 1 + numbers / least;
    return threads < useful ? threads : useful;
}

/* Only inside `run_region` of more than one thread. */
static inline int64_t thread(int64_t wanted) { return wanted > 1 && thread_number ? thread_number() : 0; }
static inline int64_t threads(int64_t wanted) { return wanted > 1 && threads_here ? threads_here() : 1; }

/* Until all `count` threads of the region are here, and see what the others wrote. */
static inline void barrier(int64_t count) {
    if (count > 1) wait_for_all();
}
