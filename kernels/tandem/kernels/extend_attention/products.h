/* The two products of attention in bfloat16, on a core's matrix unit or on its vectors. */

#pragma once

#include "extend.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AMX_TARGET "amx-tile,amx-bf16,avx512f"

__attribute__((target(AMX_TARGET))) static void open_amx(void) {
    const int64_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    set_tiles(rows);
}

__attribute__((target(AMX_TARGET))) static void close_amx(void) { _tile_release(); }

__attribute__((target(AMX_TARGET))) static void product_amx(float *c, int is_added, const uint16_t *a, int64_t a_bytes,
                                                            int64_t a_step, const uint16_t *b, int64_t steps) {
    enum { C_BYTES = 4 * ROWS };
    if (is_added) {
        _tile_loadd(0, c, C_BYTES);
        _tile_loadd(1, c + 16, C_BYTES);
        _tile_loadd(2, c + 16 * ROWS, C_BYTES);
        _tile_loadd(3, c + 16 * ROWS + 16, C_BYTES);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const char *upper = (const char *)a, *lower = upper + 16 * a_bytes;
    for (int64_t i = 0; i < steps; i++, upper += a_step, lower += a_step, b += 2 * TILE) {
        _tile_loadd(6, b, 64);
        _tile_loadd(4, upper, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, C_BYTES);
    _tile_stored(1, c + 16, C_BYTES);
    _tile_stored(2, c + 16 * ROWS, C_BYTES);
    _tile_stored(3, c + 16 * ROWS + 16, C_BYTES);
}

/* Eight rows at a time: so many sums of two vectors stay in registers. */
__attribute__((target("avx512f,avx512bw,avx512bf16,prefer-vector-width=512"))) static void product_vectors(
    float *c, int is_added, const uint16_t *a, int64_t a_bytes, int64_t a_step, const uint16_t *b, int64_t steps) {
    enum { MANY = 8 };
    for (int row = 0; row < 32; row += MANY, c += MANY * ROWS) {
        __m512 sum[MANY][2];
        for (int r = 0; r < MANY; r++)
            for (int v = 0; v < 2; v++) sum[r][v] = is_added ? _mm512_loadu_ps(c + r * ROWS + 16 * v) : _mm512_setzero_ps();
        const char *rows = (const char *)a + row * a_bytes;
        const uint16_t *tile = b;
        for (int64_t i = 0; i < steps; i++, rows += a_step, tile += 2 * TILE)
            for (int pair = 0; pair < 16; pair++) {
                const __m512bh left = (__m512bh)_mm512_loadu_si512(tile + 32 * pair);
                const __m512bh right = (__m512bh)_mm512_loadu_si512(tile + TILE + 32 * pair);
                for (int r = 0; r < MANY; r++) {
                    int32_t both;
                    memcpy(&both, rows + r * a_bytes + 4 * pair, 4);
                    const __m512bh one = (__m512bh)_mm512_set1_epi32(both);
                    sum[r][0] = _mm512_dpbf16_ps(sum[r][0], one, left);
                    sum[r][1] = _mm512_dpbf16_ps(sum[r][1], one, right);
                }
            }
        for (int r = 0; r < MANY; r++)
            for (int v = 0; v < 2; v++) _mm512_storeu_ps(c + r * ROWS + 16 * v, sum[r][v]);
    }
}

#endif
