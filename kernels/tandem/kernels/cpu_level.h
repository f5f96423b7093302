/* The highest level of instructions that this process may use: TANDEM_CPU_LEVEL, else what the CPU has.
   Names and numbers are those of core/tandem/core/cpu_level.py, which refuses unknown names before any code is loaded. */

#pragma once

#include <stdlib.h>
#include <string.h>

enum cpu_level { LEVEL_NONE, LEVEL_AVX2, LEVEL_AVX512, LEVEL_AVX512VNNI, LEVEL_AVX512BF16, LEVEL_AMX };

static int may_use(enum cpu_level level) {
    static const char *const names[] = {"none", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx"};
    const char *held = getenv("TANDEM_CPU_LEVEL");
    if (!held || !*held) return 1;
    for (enum cpu_level one = LEVEL_NONE; one <= LEVEL_AMX; one++)
        if (!strcmp(held, names[one])) return level <= one;
    return 1;
}
