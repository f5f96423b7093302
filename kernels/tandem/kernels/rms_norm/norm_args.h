/* Rows to normalise; see cpu.c. */

#pragma once

#include <stdint.h>

struct norm {
    char *x;           /* [rows][width], contiguous; what is added to it is written back */
    const char *added; /* the same, or NULL */
    const char *weight;
    char *out;
    int64_t rows, width, is_bf16, threads;
};
