/* Reads memory and does nothing with it: what a loop can have of a machine's read bandwidth. */

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

/* The sum of `bytes` bytes in words, a multiple of 512, so many `times`. Four places at once are a sixth faster than one, and
   eight sums wait for none of the others. */
WIDEST uint64_t read_all(const uint64_t *words, size_t bytes, size_t times) {
    typedef uint64_t wide __attribute__((vector_size(64)));
    const size_t quarter = bytes / 64 / 4;
    const wide *from = (const wide *)words;
    wide sums[8] = {{0}};
    for (size_t time = 0; time < times; time++)
        for (size_t i = 0; i < quarter; i += 2)
            for (int place = 0; place < 4; place++)
                for (int lane = 0; lane < 2; lane++) sums[2 * place + lane] += from[place * quarter + i + lane];
    uint64_t sum = 0;
    for (int lane = 0; lane < 8; lane++)
        for (int word = 0; word < 8; word++) sum += sums[lane][word];
    return sum;
}
