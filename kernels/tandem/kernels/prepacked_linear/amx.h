/* Columns [first, last) of a product on the matrix unit of a core (AMX), in tiles of 16 rows, 16 columns and 32 inner numbers.

   A tile of weights is read in place: 16 pairs of 16 columns. A tile with fewer rows computes those as one of 16 does. */

#pragma once

#include "../matrix_unit.h"
#include "product.h"

#if defined(__x86_64__)

#define TARGET "amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"
#define FN static inline __attribute__((always_inline, target(TARGET)))
#define ENTRY static __attribute__((target(TARGET)))

/* Sums in tiles 0 to 3, of which 0 and 1 have `upper` rows, 2 and 3 `lower`; x in 4 and 5, weights in 6 and 7. */
FN void configure(int64_t upper, int64_t lower) {
    const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    set_tiles(rows);
}

FN const uint16_t *weights_of(const struct product *p, int64_t column) {
    return p->weight + column / p->block * p->block_numbers + column % p->block * 2;
}

FN void put_tile(const struct product *p, int64_t row, int64_t rows, int64_t column, float sums[16][16]) {
    for (int64_t r = 0; r < rows; r++) put_avx512(p, row + r, column, _mm512_loadu_ps(sums[r]));
}

/* Rows from `row` on, as many as the tiles have, of 32 columns, or of 16 where the second tile is not `wanted`. */
FN void upper_and_lower(const struct product *p, int64_t row, int64_t lower, int64_t column, int is_wanted) {
    const uint16_t *left = weights_of(p, column), *right = is_wanted ? weights_of(p, column + 16) : left;
    const uint16_t *x = p->x + row * p->x_stride, *below = x + 16 * p->x_stride;
    const int64_t step = 32 * p->block, x_bytes = 2 * p->x_stride, bytes = 4 * p->block;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < p->inner; i += 32, left += step, right += step) {
        _tile_loadd(6, left, bytes);
        _tile_loadd(4, x + i, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right, bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below + i, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float sums[4][16][16] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    put_tile(p, row, 16, column, sums[0]), put_tile(p, row + 16, lower, column, sums[2]);
    if (is_wanted) put_tile(p, row, 16, column + 16, sums[1]), put_tile(p, row + 16, lower, column + 16, sums[3]);
}

/* Up to 16 rows of 64 columns: so many weights of a pair of inner numbers lie side by side. */
FN void four_wide(const struct product *p, int64_t row, int64_t rows, int64_t column) {
    const uint16_t *w[4];
    for (int v = 0; v < 4; v++) w[v] = weights_of(p, column + 16 * v);
    const uint16_t *x = p->x + row * p->x_stride;
    const int64_t step = 32 * p->block, x_bytes = 2 * p->x_stride, bytes = 4 * p->block;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0, at = 0; i < p->inner; i += 32, at += step) {
        _tile_loadd(4, x + i, x_bytes);
        _tile_loadd(6, w[0] + at, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w[1] + at, bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, w[2] + at, bytes);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, w[3] + at, bytes);
        _tile_dpbf16ps(3, 4, 7);
    }
    float sums[4][16][16] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int v = 0; v < 4; v++) put_tile(p, row, rows, column + 16 * v, sums[v]);
}

FN void one_wide(const struct product *p, int64_t row, int64_t rows, int64_t column) {
    const uint16_t *weight = weights_of(p, column), *x = p->x + row * p->x_stride;
    _tile_zero(0);
    for (int64_t i = 0; i < p->inner; i += 32, weight += 32 * p->block) {
        _tile_loadd(4, x + i, 2 * p->x_stride);
        _tile_loadd(6, weight, 4 * p->block);
        _tile_dpbf16ps(0, 4, 6);
    }
    float sums[16][16] __attribute__((aligned(64)));
    _tile_stored(0, sums, 64);
    put_tile(p, row, rows, column, sums);
}

/* Numbers of x that stay in the cache of a core while all columns go by. */
#define CACHED_ROWS 524288

ENTRY void columns_amx(const struct product *p, int64_t first, int64_t last) {
    const int64_t many = p->rows / 32 * 32, rest = p->rows - many, fitting = CACHED_ROWS / p->inner / 32 * 32;
    const int64_t step = fitting < 32 ? 32 : fitting;
    if (many) configure(16, 16);
    for (int64_t low = 0; low < many; low += step)
        for (int64_t column = first; column < last; column += 32)
            for (int64_t row = low; row < low + step && row < many; row += 32)
                upper_and_lower(p, row, 16, column, column + 16 < last);
    if (rest > 16) {
        configure(16, rest - 16);
        for (int64_t column = first; column < last; column += 32)
            upper_and_lower(p, many, rest - 16, column, column + 16 < last);
    } else if (rest) {
        configure(rest, rest);
        int64_t column = first;
        for (; column + 64 <= last; column += 64) four_wide(p, many, rest, column);
        for (; column < last; column += 16) one_wide(p, many, rest, column);
    }
    _tile_release();
}

#undef FN
#undef ENTRY
#undef TARGET

#else

static void columns_amx(const struct product *p, int64_t first, int64_t last) { columns(p, first, last); }

#endif
