/* Masks of rows; see cpu.c. */

#pragma once

#include <stdint.h>

struct masks {
    float *scores;       /* [rows][width], contiguous */
    const int64_t *rows; /* [count], distinct */
    const uint8_t *bits; /* [count][stride]: the lowest bit of a row's first byte is token 0 */
    int64_t count, width, stride, threads;
};
