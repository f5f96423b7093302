/* Columns [first, last) of a product with quantised rows, in whole vectors; compiled once a set of instructions.

   ROWS rows are multiplied with VECTORS vectors of columns at a time: so many sums stay in registers over the inner numbers,
   four of them to an instruction. Sums are exact, in 32 bits; a result is (sum · the column's scale) · the row's scale + bias
   in float32. A row of two planes is two rows here; its sum is that of both, rounded once. */

#undef Q
#undef QFN
#undef QCALLED
#undef QENTRY
#undef IVEC

#if ISA == 512

#define QTARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma"
#define Q(x) x##_vnni
#define QFN static inline __attribute__((always_inline, target(QTARGET)))
#define QCALLED QFN
#define QENTRY static __attribute__((target(QTARGET ",prefer-vector-width=512")))
#define IVEC __m512i
#define MOST_ROWS 6
#define MOST_VECTORS 4

QFN IVEC Q(load)(const void *p) { return _mm512_loadu_si512(p); }
QFN IVEC Q(all)(int32_t x) { return _mm512_set1_epi32(x); }
QFN IVEC Q(start)(const int32_t *sums) { return _mm512_slli_epi32(_mm512_loadu_si512(sums), 7); }
QFN IVEC Q(low)(IVEC both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
QFN IVEC Q(high)(IVEC both) { return _mm512_and_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi8(15)); }
/* As text: from the intrinsic GCC makes copies of the sum before and after. */
QFN IVEC Q(dot)(IVEC sum, IVEC u8, IVEC s8) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8));
    return sum;
}
QFN IVEC Q(dot_bytes)(IVEC sum, IVEC weight, int32_t x) { return Q(dot)(sum, _mm512_set1_epi32(x), weight); }
QFN IVEC Q(dot_nibbles)(IVEC sum, IVEC weight, int32_t x) { return Q(dot)(sum, weight, _mm512_set1_epi32(x)); }
/* Of a group: its dot product, which fits 16 bits (32 · 8 · 127), times the scale, and the sum of x times the offset. */
QFN IVEC Q(add_scaled)(IVEC sum, IVEC dot, int32_t x, const int8_t *grid) {
    const IVEC wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)grid));
    const IVEC both = _mm512_mask_blend_epi16(0xaaaaaaaa, dot, _mm512_set1_epi16((int16_t)x));
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(both), "v"(wide));
    return sum;
}
QFN VEC Q(as_floats)(IVEC sum) { return _mm512_cvtepi32_ps(sum); }
QFN __m256 Q(both_halves)(__m256i higher, __m256i lower) {
    return _mm512_cvtpd_ps(_mm512_fmadd_pd(_mm512_cvtepi32_pd(higher), _mm512_set1_pd(PLANE), _mm512_cvtepi32_pd(lower)));
}
QFN VEC Q(both)(IVEC higher, IVEC lower) {
    const __m256 first = Q(both_halves)(_mm512_castsi512_si256(higher), _mm512_castsi512_si256(lower));
    const __m256 second = Q(both_halves)(_mm512_extracti32x8_epi32(higher, 1), _mm512_extracti32x8_epi32(lower, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
}

#else

#define Q(x) x##_signs
#define QFN FN
#define QCALLED static __attribute__((noinline, target("avx2,fma"))) /* from so many places: compiled once */
#define QENTRY ENTRY
#define IVEC __m256i
#define MOST_ROWS 6 /* of 4 bits; of 8 bits BYTE_ROWS */
#define BYTE_ROWS 2
#define MOST_VECTORS 4

QFN IVEC Q(load)(const void *p) { return _mm256_loadu_si256(p); }
QFN IVEC Q(all)(int32_t x) { return _mm256_set1_epi32(x); }
QFN IVEC Q(start)(const int32_t *sums) { return (void)sums, _mm256_setzero_si256(); }
/* Adds the products of x, for all lanes, with two vectors to two sums. As text, for 12 sums: GCC would multiply for all rows
   first, and keep the sums on the stack. */
#define ADD_TWO(MULTIPLY, ADD, sums, x, left, right)                                                                   \
    do {                                                                                                               \
        __m256i first, second;                                                                                         \
        __asm__("vpbroadcastd %4, %3\n\t" MULTIPLY " %3, %5, %2\n\t" ADD " %2, %0, %0\n\t" MULTIPLY " %3, %6, %3\n\t"   \
                ADD " %3, %1, %1"                                                                                      \
                : "+x"((sums)[0]), "+x"((sums)[1]), "=&x"(first), "=&x"(second)                                        \
                : "m"(x), "x"(left), "x"(right));                                                                      \
    } while (0)
QFN IVEC Q(add_pairs)(IVEC sum, IVEC pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
/* |x| · (weight with x's sign): neither side is below -127, so that two products fit 16 bits, which |x| + 128 would not. */
QFN IVEC Q(dot_bytes)(IVEC sum, IVEC weight, int32_t x) {
    const IVEC given = _mm256_set1_epi32((int32_t)((uint32_t)x ^ 0x80808080u));
    return Q(add_pairs)(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(given), _mm256_sign_epi8(weight, given)));
}
QFN VEC Q(as_floats)(IVEC sum) { return _mm256_cvtepi32_ps(sum); }
QFN __m128 Q(both_halves)(__m128i higher, __m128i lower) {
    return _mm256_cvtpd_ps(_mm256_fmadd_pd(_mm256_cvtepi32_pd(higher), _mm256_set1_pd(PLANE), _mm256_cvtepi32_pd(lower)));
}
QFN VEC Q(both)(IVEC higher, IVEC lower) {
    const __m128 first = Q(both_halves)(_mm256_castsi256_si128(higher), _mm256_castsi256_si128(lower));
    return _mm256_set_m128(Q(both_halves)(_mm256_extracti128_si256(higher, 1), _mm256_extracti128_si256(lower, 1)), first);
}

#endif

/* A row's sums with a vector of columns, scaled, with the bias, to p->out. */
QCALLED void Q(put_sums)(const struct quantized *p, int64_t row, int64_t column, VEC sums) {
    const int64_t columns = p->columns, size = p->is_bf16 ? 2 : 4;
    char *out = p->out + (row * columns + column) * size;
    VEC y = NAME(mul)(NAME(mul)(sums, NAME(load_f32)(p->scales + column)), NAME(all)(p->row_scales[row]));
    if (p->bias) y = NAME(add)(y, NAME(load_f32)((const float *)p->bias + column));
    if (columns - column >= LANES) {
        if (p->is_bf16) NAME(store)(out, 0, 1, y);
        else NAME(store)(out, 0, 0, y);
    } else {
        char some[4 * LANES];
        NAME(store)(some, 0, (int)p->is_bf16, y);
        memcpy(out, some, (size_t)((columns - column) * size));
    }
}

/* The sums of ROWS rows of p->numbers, from `row` on. */
QFN void Q(put)(const struct quantized *p, int64_t row, int64_t column, IVEC (*sum)[MOST_VECTORS], const int ROWS, const int VECTORS) {
    for (int v = 0; v < VECTORS; v++) {
        if (p->planes == 1)
            for (int r = 0; r < ROWS; r++) Q(put_sums)(p, row + r, column + v * LANES, Q(as_floats)(sum[r][v]));
        else
            for (int r = 0; r + 1 < ROWS; r += 2)
                Q(put_sums)(p, (row + r) / 2, column + v * LANES, Q(both)(sum[r][v], sum[r + 1][v]));
    }
}

QFN int32_t Q(four)(const uint8_t *x) {
    int32_t numbers;
    memcpy(&numbers, x, sizeof numbers);
    return numbers;
}

/* Weights of 8 bits: [inner / 4][block][4] in a block. */
QFN void Q(tile_of_bytes)(const struct quantized *p, int64_t row, int64_t column, const int ROWS, const int VECTORS) {
    const char *weight = p->weight + column / COLUMNS * p->block_bytes + column % COLUMNS * 4;
    const uint8_t *x = p->numbers + row * p->stride;
    IVEC sum[MOST_ROWS][MOST_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = Q(start)(p->sums + column + v * LANES);
    const int is_first = (ISA == 256 || fetched_ahead) && column % COLUMNS == 0;
    for (int64_t i = 0; i < p->inner; i += 4, weight += 4 * COLUMNS) {
        IVEC here[MOST_VECTORS];
        if (is_first) NAME(prefetch)(weight, 4 * COLUMNS);
        for (int v = 0; v < VECTORS; v++) here[v] = Q(load)(weight + 4 * LANES * v);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sum[r][v] = Q(dot_bytes)(sum[r][v], here[v], Q(four)(x + r * p->stride + i));
    }
    Q(put)(p, row, column, sum, ROWS, VECTORS);
}

/* Weights of 4 bits: in a block, for each group a scale and an offset a column, then its numbers two to a byte: of
   neighbouring fours of inner numbers the first below, with 8 added. */
#if ISA == 256
#include "nibbles_avx2.h"
#else
QFN void Q(tile_of_nibbles)(const struct quantized *p, int64_t row, int64_t column, const int ROWS, const int VECTORS) {
    const char *group = p->weight + column / COLUMNS * p->block_bytes;
    const int64_t at = column % COLUMNS, skip = 2 * COLUMNS + 4 * at, groups = p->stride / GROUP;
    const int is_first = fetched_ahead && at == 0;
    const uint8_t *x = p->numbers + row * p->stride;
    const int32_t *sums = p->group_sums + row * groups;
    IVEC sum[MOST_ROWS][MOST_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = Q(all)(0);
    for (int64_t g = 0; g < groups; g++, group += GROUP_BYTES, x += GROUP) {
        IVEC dot[MOST_ROWS][MOST_VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) dot[r][v] = Q(all)(-8 * sums[r * groups + g]);
        if (is_first) NAME(prefetch)(group, GROUP_BYTES);
#pragma GCC unroll 4
        for (int j = 0; j < GROUP / 8; j++)
            for (int v = 0; v < VECTORS; v++) {
                const IVEC both = Q(load)(group + skip + 4 * COLUMNS * j + 4 * LANES * v);
                const IVEC low = Q(low)(both), high = Q(high)(both);
                for (int r = 0; r < ROWS; r++) {
                    dot[r][v] = Q(dot_nibbles)(dot[r][v], low, Q(four)(x + r * p->stride + 8 * j));
                    dot[r][v] = Q(dot_nibbles)(dot[r][v], high, Q(four)(x + r * p->stride + 8 * j + 4));
                }
            }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] = Q(add_scaled)(sum[r][v], dot[r][v], sums[r * groups + g], (const int8_t *)group + 2 * (at + LANES * v));
    }
    Q(put)(p, row, column, sum, ROWS, VECTORS);
}
#endif

#if ISA == 512
QFN void Q(tile)(const struct quantized *p, int64_t row, int64_t column, const int ROWS, const int VECTORS) {
    if (p->bits == 8) Q(tile_of_bytes)(p, row, column, ROWS, VECTORS);
    else Q(tile_of_nibbles)(p, row, column, ROWS, VECTORS);
}
#endif

QFN void Q(all_rows)(const struct quantized *p, int64_t column, const int VECTORS) {
    const int64_t rows = p->rows * p->planes;
    int64_t row = 0;
#if ISA == 256
    if (p->bits == 8) {
        for (; row + BYTE_ROWS <= rows; row += BYTE_ROWS) Q(tile_of_bytes)(p, row, column, BYTE_ROWS, VECTORS);
        if (row < rows) Q(tile_of_bytes)(p, row, column, 1, VECTORS);
        return;
    }
    if (VECTORS == 2) {
        for (; row + MOST_ROWS <= rows; row += MOST_ROWS) Q(tile_of_nibbles)(p, row, column, MOST_ROWS, VECTORS);
        if (row + 4 <= rows) Q(tile_of_nibbles)(p, row, column, 4, VECTORS), row += 4;
    }
    for (; VECTORS <= 2 && row + 2 <= rows; row += 2) Q(tile_of_nibbles)(p, row, column, 2, VECTORS);
    if (row < rows) Q(tile_of_nibbles)(p, row, column, 1, VECTORS); /* more than two vectors meet one row or none */
#else
    for (; row + MOST_ROWS <= rows; row += MOST_ROWS) Q(tile)(p, row, column, MOST_ROWS, VECTORS);
    switch (rows - row) {
    case 5: Q(tile)(p, row, column, 5, VECTORS); break;
    case 4: Q(tile)(p, row, column, 4, VECTORS); break;
    case 3: Q(tile)(p, row, column, 3, VECTORS); break;
    case 2: Q(tile)(p, row, column, 2, VECTORS); break;
    case 1: Q(tile)(p, row, column, 1, VECTORS); break;
    }
#endif
}

QENTRY void Q(quantized_columns)(const struct quantized *p, int64_t first, int64_t last) {
    const int64_t most = p->bits == 4 && p->rows * p->planes > 1 ? 2 : MOST_VECTORS; /* unpacked numbers need registers, too */
    while (first < last) {
        const int64_t of_block = COLUMNS - first % COLUMNS, left = last - first;
        const int64_t vectors = (of_block < left ? of_block : left) / LANES;
        switch (vectors < most ? vectors : most) {
        case 1: Q(all_rows)(p, first, 1), first += LANES; break;
        case 2: Q(all_rows)(p, first, 2), first += 2 * LANES; break;
        case 3: Q(all_rows)(p, first, 3), first += 3 * LANES; break;
        default: Q(all_rows)(p, first, MOST_VECTORS), first += MOST_VECTORS * LANES;
        }
    }
}

#undef MOST_ROWS
#undef BYTE_ROWS
#undef MOST_VECTORS
#undef QTARGET
