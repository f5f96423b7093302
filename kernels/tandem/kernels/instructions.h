/* This CPU's vector instructions, by name; a library has code for some of them and chooses when it runs. */

#pragma once

#include "cpu_level.h"

#include <stdint.h>
#include <string.h>

enum instructions { NONE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3 };

/* True if one instruction rounds float32 to bfloat16: AVX512-BF16 has it, which flushes numbers below 2^-126. */
static int rounds_in_one;

/* Bytes ahead of a single pass over weights to fetch: Intel's cores read them up to 1.5 times as fast so. */
static int64_t fetched_ahead;

/* The best up to `best`, or the named one; NONE if this CPU has not got it. */
static int choose_instructions(const char *name, int best) {
#if defined(__x86_64__)
    static const char *const names[] = {"", "avx2", "avx512", "avx512bf16"};
    __builtin_cpu_init();
    fetched_ahead = __builtin_cpu_is("intel") ? 2048 : 0;
    int has = NONE;
    if (may_use(LEVEL_AVX2) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        has = AVX2;
        if (may_use(LEVEL_AVX512) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            has = may_use(LEVEL_AVX512BF16) && __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
    }
    rounds_in_one = has == AVX512_BF16 && strcmp(name, "avx512");
    if (has > best) has = best;
    if (!*name) return has;
    for (int one = AVX2; one <= has; one++)
        if (!strcmp(name, names[one])) return one;
#endif
    (void)name, (void)best;
    return NONE;
}
