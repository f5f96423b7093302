/* Columns [first, last) of a product of many rows on AVX2, in whole vectors of 8. Six rows meet 16 columns, whose numbers of
   8 or 4 bits are widened to 16 once for a block of rows: an instruction then adds two products a column in 32 bits, exactly.

   Rows of two planes take part as their numbers of 16 bits: 256 of such products fit 32, and are added up in float64, exactly.

   Of every four inner numbers the first and the third are a pair, and the second and the fourth:

       wide[rows / 6][inner / 4][2][6] pairs        panel[inner / 4][2][columns] pairs */

#pragma once

#define TILE_ROWS 6
/* Rows that are widened; fewer go as they lie, which costs less. _MANY_ROWS in linear.py. */
#define MANY_ROWS(bits, planes) ((bits) == 4 ? (planes) == 2 ? 12 : INT64_MAX : (planes) == 2 ? 4 : 14)
#define PANEL_COLUMNS 16
#define MOST_PAIRS 256 /* whose products, 2 · 127 · 32512 at most, fit 32 bits together */
#define BLOCK_NUMBERS 98304 /* of rows that meet one panel after the other: they stay in a core's cache */

struct many {
    struct quantized product;
    int32_t *wide;   /* room for the rows' pairs, of whole tiles of rows with `stride` numbers each */
    int32_t *panels; /* room for PANEL_COLUMNS / 2 · stride pairs a thread */
};

/* Tiles [first, last) of the quantised rows as pairs. */
FN void Q(widen_tile)(const struct many *m, int64_t tile) {
    const struct quantized *p = &m->product;
    int32_t *wide = m->wide + tile * TILE_ROWS * (p->stride / 2);
    for (int r = 0; r < TILE_ROWS; r++) {
        const int64_t row = tile * TILE_ROWS + r;
        const uint8_t *numbers = p->numbers + row * p->planes * p->stride, *lower = numbers + (p->planes - 1) * p->stride;
        const int times = p->planes == 2 ? PLANE : 0; /* of one plane, both are the same */
        const int flip = p->bits == 8 ? 0x80 : 0;     /* as quantize_row has it */
        for (int64_t i = 0; i < p->stride; i += 4) {
            int16_t some[4] = {0};
            for (int j = 0; j < 4 && row < p->rows; j++)
                some[j] = (int16_t)(times * (int8_t)(numbers[i + j] ^ flip) + (int8_t)(lower[i + j] ^ flip));
            int32_t *out = wide + (i / 4) * 2 * TILE_ROWS + r;
            const int16_t pairs[4] = {some[0], some[2], some[1], some[3]};
            memcpy(out, pairs, 4), memcpy(out + TILE_ROWS, pairs + 2, 4);
        }
    }
}
ENTRY void Q(widen_tiles)(const struct many *m, int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile++) Q(widen_tile)(m, tile);
}

FN void Q(widen_panel)(const struct quantized *p, int32_t *panel, int64_t column, const int VECTORS) {
    const char *weight = p->weight + column / COLUMNS * p->block_bytes + column % COLUMNS * 4;
    for (int64_t i = 0; i < p->inner; i += 4, weight += 4 * COLUMNS, panel += 16 * VECTORS) {
        if (column % COLUMNS == 0) NAME(prefetch)(weight, 4 * COLUMNS);
        for (int v = 0; v < VECTORS; v++) {
            const __m256i fours = Q(load)(weight + 32 * v);
            _mm256_storeu_si256((void *)(panel + 8 * v), _mm256_srai_epi16(_mm256_slli_epi16(fours, 8), 8));
            _mm256_storeu_si256((void *)(panel + 8 * (VECTORS + v)), _mm256_srai_epi16(fours, 8));
        }
    }
}

/* Inner numbers i to i + 3 of 8 columns, of which `fours` has one in each byte: scale · q + offset. */
FN void Q(widen_nibbles)(int32_t *panel, __m256i fours, __m256i scales, __m256i offsets, const int VECTORS) {
    const __m256i first = _mm256_and_si256(fours, _mm256_set1_epi16(255)), second = _mm256_srli_epi16(fours, 8);
    _mm256_storeu_si256((void *)panel, _mm256_add_epi16(_mm256_mullo_epi16(first, scales), offsets));
    _mm256_storeu_si256((void *)(panel + 8 * VECTORS), _mm256_add_epi16(_mm256_mullo_epi16(second, scales), offsets));
}

FN void Q(widen_panel_of_nibbles)(const struct quantized *p, int32_t *panel, int64_t column, const int VECTORS) {
    const char *group = p->weight + column / COLUMNS * p->block_bytes;
    const int64_t at = column % COLUMNS;
    const __m256i low = _mm256_set1_epi8(15), half = _mm256_set1_epi32(0xffff);
    for (int64_t i = 0; i < p->inner; i += GROUP, group += GROUP_BYTES) {
        NAME(prefetch)(group, GROUP_BYTES);
        for (int v = 0; v < VECTORS; v++) {
            const __m256i both = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(group + 2 * (at + 8 * v))));
            const __m256i scale = _mm256_and_si256(both, half), offset = _mm256_srli_epi32(both, 16);
            const __m256i scales = _mm256_or_si256(scale, _mm256_slli_epi32(scale, 16));
            __m256i offsets = _mm256_or_si256(offset, _mm256_slli_epi32(offset, 16));
            offsets = _mm256_sub_epi16(offsets, _mm256_slli_epi16(scales, 3)); /* q is stored from 0 to 15 */
            for (int64_t j = 0; j < GROUP && i + j < p->inner; j += 8) {
                const __m256i eights = Q(load)(group + 2 * COLUMNS + j / 8 * 4 * COLUMNS + 4 * (at + 8 * v));
                int32_t *out = panel + (i + j) / 4 * 16 * VECTORS + 8 * v;
                Q(widen_nibbles)(out, _mm256_and_si256(eights, low), scales, offsets, VECTORS);
                if (i + j + 4 >= p->inner) break;
                const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(eights, 4), low);
                Q(widen_nibbles)(out + 16 * VECTORS, upper, scales, offsets, VECTORS);
            }
        }
    }
}

FN void Q(add_exactly)(double *total, __m256i sum) {
    const __m256d first = _mm256_cvtepi32_pd(_mm256_castsi256_si128(sum)), second = _mm256_cvtepi32_pd(_mm256_extracti128_si256(sum, 1));
    _mm256_storeu_pd(total, _mm256_add_pd(_mm256_loadu_pd(total), first));
    _mm256_storeu_pd(total + 4, _mm256_add_pd(_mm256_loadu_pd(total + 4), second));
}

FN void Q(many_tile)(const struct many *m, const int32_t *panel, int64_t tile, int64_t column, const int ROWS, const int VECTORS) {
    const struct quantized *p = &m->product;
    const int32_t *x = m->wide + tile * TILE_ROWS * (p->stride / 2);
    const int64_t row = tile * TILE_ROWS, rows = p->rows - row < ROWS ? p->rows - row : ROWS;
    double exact[TILE_ROWS][2][LANES];
    if (p->planes == 2) memset(exact, 0, sizeof exact);
    for (int64_t pairs = (p->inner + 3) / 4 * 2, most = p->planes == 2 ? MOST_PAIRS : pairs; pairs > 0; pairs -= most) {
        __m256i sum[TILE_ROWS][2];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
        for (int64_t here = pairs < most ? pairs : most; here; here--, panel += 8 * VECTORS, x += TILE_ROWS) {
            const __m256i left = Q(load)(panel), right = Q(load)(panel + 8 * (VECTORS - 1));
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) ADD_TWO("vpmaddwd", "vpaddd", sum[r], x[r], left, right);
        }
        __m256i whole[TILE_ROWS][2]; /* an array that is indexed by a variable would keep the sums out of registers */
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) whole[r][0] = sum[r][0], whole[r][1] = sum[r][1];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) {
                if (p->planes == 2) Q(add_exactly)(exact[r][v], whole[r][v]);
                else Q(put_sums)(p, row + r, column + v * LANES, Q(as_floats)(whole[r][v]));
            }
    }
    for (int r = 0; r < rows && p->planes == 2; r++)
        for (int v = 0; v < VECTORS; v++) {
            const double *each = exact[r][v];
            const __m128 first = _mm256_cvtpd_ps(_mm256_loadu_pd(each)), second = _mm256_cvtpd_ps(_mm256_loadu_pd(each + 4));
            Q(put_sums)(p, row + r, column + v * LANES, _mm256_set_m128(second, first));
        }
}

FN void Q(many_panel)(const struct many *m, int32_t *panel, int64_t tile, int64_t end, int64_t column, const int VECTORS) {
    if (m->product.bits == 4) Q(widen_panel_of_nibbles)(&m->product, panel, column, VECTORS);
    else Q(widen_panel)(&m->product, panel, column, VECTORS);
    for (; tile < end; tile++)
        switch (VECTORS == 2 ? m->product.rows - tile * TILE_ROWS : TILE_ROWS) { /* the last ones cost what they are */
        case 1:
        case 2: Q(many_tile)(m, panel, tile, column, 2, VECTORS); break;
        case 3:
        case 4: Q(many_tile)(m, panel, tile, column, 4, VECTORS); break;
        default: Q(many_tile)(m, panel, tile, column, TILE_ROWS, VECTORS);
        }
}

ENTRY void Q(many_columns)(const struct many *m, int32_t *panel, int64_t first, int64_t last) {
    const struct quantized *p = &m->product;
    const int64_t tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS, fitting = BLOCK_NUMBERS / (TILE_ROWS * p->stride);
    const int64_t together = fitting < 3 ? 3 : fitting;
    for (int64_t tile = 0; tile < tiles; tile += together) {
        const int64_t end = tile + together < tiles ? tile + together : tiles;
        for (int64_t column = first; column < last;) {
            if (last - column >= PANEL_COLUMNS && COLUMNS - column % COLUMNS >= PANEL_COLUMNS)
                Q(many_panel)(m, panel, tile, end, column, 2), column += PANEL_COLUMNS;
            else Q(many_panel)(m, panel, tile, end, column, 1), column += LANES;
        }
    }
}

/* A thread's share; rows are quantised already, and threads meet when they have widened them. */
ENTRY void Q(many_share)(const struct many *m, int64_t which, int64_t count) {
    const struct quantized *p = &m->product;
    const int64_t tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS, vectors = (p->columns + LANES - 1) / LANES;
    int32_t *panel = m->panels + which * (PANEL_COLUMNS / 2) * p->stride;
    Q(widen_tiles)(m, tiles * which / count, tiles * (which + 1) / count);
    barrier(count);
    Q(many_columns)(m, panel, vectors * which / count * LANES, vectors * (which + 1) / count * LANES);
}
