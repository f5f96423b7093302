/* Rows to turn; see cpu.c. */

#pragma once

#include <stdint.h>

struct rope_args {
    char *x;               /* [rows][heads][width]; heads and width contiguous */
    const char *cos, *sin; /* [rows][width]; sin with the sign of the half */
    int64_t rows, heads, width;
    int64_t x_stride, table_stride; /* from row to row, in numbers */
    int64_t is_bf16, threads;
};
