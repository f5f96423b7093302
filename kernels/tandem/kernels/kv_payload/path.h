/* Chooses the code that copies and sums, by the CPU's features when the library is loaded. */

#pragma once

#include "../cpu_level.h"
#include "stream.h"

#if defined(__x86_64__)
#include "stream_x86.h"
#endif
#if defined(__aarch64__) && defined(__linux__)
#include "stream_arm.h"
#endif

struct path { const char *name; advance_fn *advance; finish_fn *finish; };

static const struct path TABLE_PATH = {"table", advance_by_table, finish_by_table};
static struct path best_path = {"table", advance_by_table, finish_by_table};
static int has_avx2, has_avx512;

__attribute__((constructor)) static void choose_path(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    has_fast_strings = __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & 1 << 9;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("pclmul"))
        best_path = (struct path){"pclmul", advance_sse, finish_sse};
    const int has_vectors = may_use(LEVEL_AVX512) && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (has_vectors && __builtin_cpu_supports("vpclmulqdq"))
        best_path = (struct path){"vpclmul", advance_avx512, finish_avx512};
    has_avx2 = may_use(LEVEL_AVX2) && __builtin_cpu_supports("avx2");
    has_avx512 = has_vectors && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & (1 << 7)) best_path = (struct path){"arm-crc", advance_arm, finish_by_table};
#endif
}

/* For tests and for people: the path in use, and its choice by name ("" = the best again). Not thread-safe. */
const char *tandem_path(void) { return best_path.name; }

int tandem_choose_path(const char *name) {
    has_avx2 = has_avx512 = 0;
    best_path = TABLE_PATH;
    if (strcmp(name, "table") == 0) return 1;
#if defined(__x86_64__)
    if (strcmp(name, "pclmul") == 0) {
        if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return 0;
        best_path = (struct path){"pclmul", advance_sse, finish_sse};
        has_avx2 = may_use(LEVEL_AVX2) && __builtin_cpu_supports("avx2");
        return 1;
    }
#endif
    choose_path();
    return strcmp(name, "") == 0 || strcmp(name, best_path.name) == 0;
}
