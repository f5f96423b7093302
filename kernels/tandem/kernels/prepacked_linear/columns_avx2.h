/* Columns [first, last) of a product on AVX2, in whole vectors of 16 numbers: bfloat16 is widened to float32 in registers.
   A sum is made in the same order whatever the number of rows.

   Few rows are read as they are: up to four of them meet up to four vectors of eight columns. Of many rows six meet 16
   columns; their numbers lie side by side in float32, widened once for all columns:

       wide[rows / 6][inner][6] */

#pragma once

#define ISA 256
#include "../vectors.h"

#define TILE_ROWS 6
#define BLOCK_NUMBERS 98304 /* of rows that meet one panel of the weight after the other: they stay in a core's cache */

FN VEC NAME(even)(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
FN VEC NAME(odd)(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int32_t)0xffff0000))); }
FN __m256i NAME(pairs)(const uint16_t *p) { return _mm256_loadu_si256((const void *)p); }

FN const uint16_t *NAME(panel)(const struct product *p, int64_t column) {
    return p->weight + column / p->block * p->block_numbers + column % p->block * 2;
}

FN void NAME(put)(const struct product *p, int64_t row, int64_t column, VEC sum) {
    if (p->bias) sum = NAME(add)(sum, NAME(load_bf16)(p->bias + column));
    NAME(store_bf16)(p->out + row * p->columns + column, sum);
}

/* IS_FIRST: it fetches the weight's block ahead. A loop without a turn would cost all others a tenth. */
FN void NAME(tile_of)(
    const struct product *p, int64_t row, int64_t column, const int ROWS, const int VECTORS, const int IS_FIRST) {
    const uint16_t *weight = NAME(panel)(p, column), *x = p->x + row * p->x_stride;
    const int64_t whole = 4 * p->block;
    VEC sum[4][4];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = NAME(zero)();
    for (int64_t i = 0; i < p->inner; i += 2, weight += 2 * p->block) {
        VEC even[4], odd[4];
        if (IS_FIRST)
            for (const char *next = (const char *)weight + fetched_ahead, *end = next + whole; next < end; next += 64)
                __builtin_prefetch(next);
        for (int v = 0; v < VECTORS; v++) {
            const __m256i here = NAME(pairs)(weight + 16 * v);
            even[v] = NAME(even)(here), odd[v] = NAME(odd)(here);
        }
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            memcpy(&pair, x + r * p->x_stride + i, sizeof pair);
            const __m256i both = _mm256_set1_epi32(pair);
            const VEC first = NAME(even)(both), second = NAME(odd)(both);
            for (int v = 0; v < VECTORS; v++) sum[r][v] = NAME(fma)(first, even[v], sum[r][v]);
            for (int v = 0; v < VECTORS; v++) sum[r][v] = NAME(fma)(second, odd[v], sum[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) NAME(put)(p, row + r, column + 8 * v, sum[r][v]);
}

FN void NAME(tile)(const struct product *p, int64_t row, int64_t column, const int ROWS, const int VECTORS) {
    if (fetched_ahead && row == 0 && column % p->block == 0) NAME(tile_of)(p, row, column, ROWS, VECTORS, 1);
    else NAME(tile_of)(p, row, column, ROWS, VECTORS, 0);
}

FN void NAME(rows)(const struct product *p, int64_t column, const int VECTORS) {
    int64_t row = 0;
    if (VECTORS == 2)
        for (; row + 4 <= p->rows; row += 4) NAME(tile)(p, row, column, 4, VECTORS);
    for (; row + 2 <= p->rows; row += 2) NAME(tile)(p, row, column, 2, VECTORS);
    if (row < p->rows) NAME(tile)(p, row, column, 1, VECTORS);
}

ENTRY void NAME(columns)(const struct product *p, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t of_block = p->block - first % p->block, left = last - first;
        if (p->rows <= 2 && of_block >= 32 && left >= 32) NAME(rows)(p, first, 4), first += 32;
        else NAME(rows)(p, first, 2), first += 16;
    }
}

/* Tiles [first, last) of the rows, widened. */
ENTRY void NAME(widen_tiles)(const struct product *p, int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile++) {
        float *wide = p->wide + tile * TILE_ROWS * p->inner;
        for (int r = 0; r < TILE_ROWS; r++) {
            const int64_t row = tile * TILE_ROWS + r;
            if (row >= p->rows) {
                for (int64_t i = 0; i < p->inner; i++) wide[i * TILE_ROWS + r] = 0.0f;
                continue;
            }
            const uint16_t *x = p->x + row * p->x_stride;
            for (int64_t i = 0; i < p->inner; i++) {
                const uint32_t bits = (uint32_t)x[i] << 16;
                memcpy(wide + i * TILE_ROWS + r, &bits, sizeof bits);
            }
        }
    }
}

FN void NAME(wide_tile)(const struct product *p, int64_t tile, int64_t column) {
    const uint16_t *weight = NAME(panel)(p, column);
    const float *x = p->wide + tile * TILE_ROWS * p->inner;
    VEC sum[TILE_ROWS][2];
    for (int r = 0; r < TILE_ROWS; r++) sum[r][0] = sum[r][1] = NAME(zero)();
    for (int64_t i = 0; i < p->inner; i += 2, weight += 2 * p->block, x += 2 * TILE_ROWS) {
        VEC left = NAME(even)(NAME(pairs)(weight)), right = NAME(even)(NAME(pairs)(weight + 16));
#pragma GCC unroll 6
        for (int r = 0; r < TILE_ROWS; r++) {
            const VEC number = NAME(all)(x[r]);
            sum[r][0] = NAME(fma)(number, left, sum[r][0]), sum[r][1] = NAME(fma)(number, right, sum[r][1]);
        }
        left = NAME(odd)(NAME(pairs)(weight)), right = NAME(odd)(NAME(pairs)(weight + 16));
#pragma GCC unroll 6
        for (int r = 0; r < TILE_ROWS; r++) {
            const VEC number = NAME(all)(x[TILE_ROWS + r]);
            sum[r][0] = NAME(fma)(number, left, sum[r][0]), sum[r][1] = NAME(fma)(number, right, sum[r][1]);
        }
    }
    const int64_t row = tile * TILE_ROWS, rows = p->rows - row < TILE_ROWS ? p->rows - row : TILE_ROWS;
    for (int r = 0; r < rows; r++) NAME(put)(p, row + r, column, sum[r][0]), NAME(put)(p, row + r, column + 8, sum[r][1]);
}

/* As `columns`, of rows that are widened. */
ENTRY void NAME(wide_columns)(const struct product *p, int64_t first, int64_t last) {
    const int64_t tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS, fitting = BLOCK_NUMBERS / (TILE_ROWS * p->inner);
    const int64_t together = fitting < 3 ? 3 : fitting;
    for (int64_t tile = 0; tile < tiles; tile += together)
        for (int64_t column = first; column < last; column += 16)
            for (int64_t t = tile; t < tile + together && t < tiles; t++) NAME(wide_tile)(p, t, column);
}

#undef ISA
