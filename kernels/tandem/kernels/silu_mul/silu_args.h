/* Rows of gates; see cpu.c. */

#pragma once

#include <stdint.h>

struct gates {
    const char *x; /* [rows][2 · width], contiguous: gate, then up */
    char *out;     /* [rows][width] */
    int64_t rows, width;
    int64_t out_stride; /* from row to row, in numbers */
    int64_t is_bf16, threads;
};
