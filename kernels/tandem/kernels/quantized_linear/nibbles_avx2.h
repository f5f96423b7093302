/* ROWS rows with VECTORS vectors of columns of 4 bits on AVX2: tile_of_nibbles of columns.h, which includes this.

   Numbers of the weight are from 0 to 15 here, 8 more than they are, and those of rows from -127 to 127: the 16 products of a
   group in a lane are added up in its 16 bits. A lane begins at -4 · the sum of the row's numbers in the group, and the two
   of a column together at -8 of it; whatever the numbers, each then ends between -30480 and 30480. */

#pragma once

typedef int32_t unaligned_fours __attribute__((may_alias, aligned(1)));

/* As text: a register that kept the mask would be one of the sums'. */
FN IVEC Q(lower)(IVEC both) {
    static const uint64_t mask[4] = {0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f};
    __asm__("vpand %1, %0, %0" : "+x"(both) : "m"(mask));
    return both;
}

/* Adds the products of four inner numbers, of which `here` has one in each byte. */
FN void Q(add_fours)(IVEC (*dot)[MOST_VECTORS], const IVEC *here, const uint8_t *x, int64_t stride, const int ROWS, const int VECTORS) {
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
        const unaligned_fours *fours = (const unaligned_fours *)(x + r * stride);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v += 2)
            if (v + 1 < VECTORS) ADD_TWO("vpmaddubsw", "vpaddw", dot[r] + v, *fours, here[v], here[v + 1]);
            else dot[r][v] = _mm256_add_epi16(dot[r][v], _mm256_maddubs_epi16(here[v], _mm256_set1_epi32(*fours)));
    }
}

FN void Q(tile_of_nibbles)(const struct quantized *p, int64_t row, int64_t column, const int ROWS, const int VECTORS) {
    const char *group = p->weight + column / COLUMNS * p->block_bytes;
    const int64_t at = column % COLUMNS, groups = p->stride / GROUP;
    const uint8_t *x = p->numbers + row * p->stride;
    const int32_t *sums = p->group_sums + row * groups;
    IVEC sum[MOST_ROWS][MOST_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = Q(all)(0);
    for (int64_t g = 0; g < groups; g++, group += GROUP_BYTES, x += GROUP) {
        IVEC dot[MOST_ROWS][MOST_VECTORS], here[MOST_VECTORS];
        if (at == 0) NAME(prefetch)(group, GROUP_BYTES);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) dot[r][v] = _mm256_set1_epi16((int16_t)(-4 * sums[r * groups + g]));
        const char *numbers = group + 2 * COLUMNS + 4 * at;
#pragma GCC unroll 4
        for (int j = 0; j < GROUP; j += 8, numbers += 4 * COLUMNS) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) here[v] = Q(lower)(Q(load)(numbers + 32 * v));
            Q(add_fours)(dot, here, x + j, p->stride, ROWS, VECTORS);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) here[v] = Q(lower)(_mm256_srli_epi16(Q(load)(numbers + 32 * v), 4));
            Q(add_fours)(dot, here, x + j + 4, p->stride, ROWS, VECTORS);
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) { /* a column's scale and offset in 16 bits each */
            const IVEC grid = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(group + 2 * (at + LANES * v))));
            const IVEC scale = _mm256_blend_epi16(grid, _mm256_slli_epi32(grid, 16), 0xaa), offset = _mm256_srai_epi32(grid, 16);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const IVEC rest = _mm256_madd_epi16(offset, Q(all)(sums[r * groups + g] & 0xffff));
                sum[r][v] = _mm256_add_epi32(sum[r][v], _mm256_add_epi32(_mm256_madd_epi16(dot[r][v], scale), rest));
            }
        }
    }
    Q(put)(p, row, column, sum, ROWS, VECTORS);
}
