/* Reads memory and does nothing with it: what a loop can have of a machine's read bandwidth. */

#include <stddef.h>
#include <stdint.h>

/* The sum of `bytes` bytes in words, a multiple of 512: eight streams of additions, so that none waits for another. */
uint64_t read_all(const uint64_t *words, size_t bytes) {
    typedef uint64_t wide __attribute__((vector_size(64)));
    const wide *from = (const wide *)words;
    wide sums[8] = {{0}};
    for (size_t i = 0; i < bytes / 64; i += 8)
        for (int lane = 0; lane < 8; lane++) sums[lane] += from[i + lane];
    uint64_t sum = 0;
    for (int lane = 0; lane < 8; lane++)
        for (int word = 0; word < 8; word++) sum += sums[lane][word];
    return sum;
}
