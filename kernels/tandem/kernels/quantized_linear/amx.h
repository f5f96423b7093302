/* Columns [first, last) of a product with a weight of 8 bits on the matrix unit of a core (AMX), in tiles of 16 rows,
   16 columns and 64 inner numbers. The sums are those of columns.h, exactly, and so are the results.

   A tile of weights is read in place: 16 fours of 16 columns. The last one may reach beyond the block, where the rows have
   bytes of 0 (not of 128, which stands for the number 0): what is read there adds nothing. A row of two planes is two rows. */

#pragma once

#include "../matrix_unit.h"
#include "product.h"

#if defined(__x86_64__)

#define TILE_FN static inline __attribute__((always_inline, target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")))
#define TILE_ENTRY static __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,prefer-vector-width=512")))

typedef int32_t tile_sums[16][16];

/* Sums in tiles 0 to 3; rows in 4 and, where there are `lower` ones, in 5; weights in 6 and 7. */
TILE_FN void set_tiles_of(int64_t upper, int64_t lower) {
    const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    set_tiles(rows);
}

TILE_FN const char *tile_at(const struct quantized *p, int64_t column) {
    return p->weight + column / COLUMNS * p->block_bytes + column % COLUMNS * 4;
}

TILE_FN __m512i whole_sums(const int32_t *sums, __m512i start) { return _mm512_add_epi32(_mm512_load_si512(sums), start); }

/* `rows` of p->numbers from `row` on: both planes of a number, if there are two, are in one tile. */
TILE_FN void put_sum_tile(const struct quantized *p, int64_t row, int64_t rows, int64_t column, tile_sums sums) {
    const __m512i start = start_vnni(p->sums + column);
    if (p->planes == 1)
        for (int64_t r = 0; r < rows; r++) put_sums_vnni(p, row + r, column, as_floats_vnni(whole_sums(sums[r], start)));
    else
        for (int64_t r = 0; r + 1 < rows; r += 2) {
            const VEC both = both_vnni(whole_sums(sums[r], start), whole_sums(sums[r + 1], start));
            put_sums_vnni(p, (row + r) / 2, column, both);
        }
}

/* 16 rows and `lower` more of 32 columns, or of 16 where the second tile is not `wanted`. */
TILE_FN void quantized_upper_and_lower(const struct quantized *p, int64_t row, int64_t lower, int64_t column, int is_wanted) {
    const char *left = tile_at(p, column), *right = is_wanted ? tile_at(p, column + 16) : left;
    const uint8_t *upper_row = p->numbers + row * p->stride, *lower_row = upper_row + 16 * p->stride;
    const int64_t step = TILE_NUMBERS * COLUMNS, bytes = 4 * COLUMNS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < p->inner; i += TILE_NUMBERS, left += step, right += step) {
        _tile_loadd(6, left, bytes);
        _tile_loadd(4, upper_row + i, p->stride);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(7, right, bytes);
        _tile_dpbusd(1, 4, 7);
        _tile_loadd(5, lower_row + i, p->stride);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    tile_sums sums[4] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(2, sums[2], 64);
    put_sum_tile(p, row, 16, column, sums[0]), put_sum_tile(p, row + 16, lower, column, sums[2]);
    if (!is_wanted) return;
    _tile_stored(1, sums[1], 64);
    _tile_stored(3, sums[3], 64);
    put_sum_tile(p, row, 16, column + 16, sums[1]), put_sum_tile(p, row + 16, lower, column + 16, sums[3]);
}

/* Up to 16 rows of 64 columns: a block of the weight has so many. */
TILE_FN void quantized_four_wide(const struct quantized *p, int64_t row, int64_t rows, int64_t column) {
    const char *weight[4];
    for (int v = 0; v < 4; v++) weight[v] = tile_at(p, column + 16 * v);
    const uint8_t *x = p->numbers + row * p->stride;
    const int64_t step = TILE_NUMBERS * COLUMNS, bytes = 4 * COLUMNS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0, at = 0; i < p->inner; i += TILE_NUMBERS, at += step) {
        _tile_loadd(4, x + i, p->stride);
        _tile_loadd(6, weight[0] + at, bytes);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(7, weight[1] + at, bytes);
        _tile_dpbusd(1, 4, 7);
        _tile_loadd(6, weight[2] + at, bytes);
        _tile_dpbusd(2, 4, 6);
        _tile_loadd(7, weight[3] + at, bytes);
        _tile_dpbusd(3, 4, 7);
    }
    tile_sums sums[4] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int v = 0; v < 4; v++) put_sum_tile(p, row, rows, column + 16 * v, sums[v]);
}

TILE_FN void quantized_one_wide(const struct quantized *p, int64_t row, int64_t rows, int64_t column) {
    const char *weight = tile_at(p, column);
    const uint8_t *x = p->numbers + row * p->stride;
    _tile_zero(0);
    for (int64_t i = 0; i < p->inner; i += TILE_NUMBERS, weight += TILE_NUMBERS * COLUMNS) {
        _tile_loadd(4, x + i, p->stride);
        _tile_loadd(6, weight, 4 * COLUMNS);
        _tile_dpbusd(0, 4, 6);
    }
    tile_sums sums __attribute__((aligned(64)));
    _tile_stored(0, sums, 64);
    put_sum_tile(p, row, rows, column, sums);
}

/* Bytes of rows that stay in the cache of a core while all columns go by. */
#define CACHED_NUMBERS (1 << 20)

TILE_ENTRY void quantized_columns_amx(const struct quantized *p, int64_t first, int64_t last) {
    const int64_t rows = p->rows * p->planes, many = rows / 32 * 32, rest = rows - many;
    const int64_t fitting = CACHED_NUMBERS / p->stride / 32 * 32, step = fitting < 32 ? 32 : fitting;
    if (many) set_tiles_of(16, 16);
    for (int64_t low = 0; low < many; low += step)
        for (int64_t column = first; column < last; column += 32)
            for (int64_t row = low; row < low + step && row < many; row += 32)
                quantized_upper_and_lower(p, row, 16, column, column + 16 < last);
    if (rest > 16) {
        set_tiles_of(16, rest - 16);
        for (int64_t column = first; column < last; column += 32)
            quantized_upper_and_lower(p, many, rest - 16, column, column + 16 < last);
    } else if (rest) {
        set_tiles_of(rest, rest);
        int64_t column = first;
        for (; column + 64 <= last; column += 64) quantized_four_wide(p, many, rest, column);
        for (; column < last; column += 16) quantized_one_wide(p, many, rest, column);
    }
    _tile_release();
}

#undef TILE_FN
#undef TILE_ENTRY

#endif
