/* A block of a weight of 4 bits as one of 8, for AVX-512: [inner / 4][64][4]. Whole groups are written; rows have zeros behind
   the last inner number. */

#pragma once

#include "product.h"

#if defined(__x86_64__)

/* For a vector of 16 columns: the scales in both halves of 32 bits, and what is added to scale · q, q from 0 to 15, in each byte. */
FN void grid_of(const char *grid, __m512i *scales, __m512i *offsets) {
    const __m512i both = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)grid));
    const __m512i first = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    const __m512i scale_bytes = _mm512_shuffle_epi8(both, first);
    const __m512i offset_bytes = _mm512_shuffle_epi8(both, _mm512_or_si512(first, _mm512_set1_epi8(1)));
    *scales = _mm512_and_si512(scale_bytes, _mm512_set1_epi16(255));
    *offsets = _mm512_sub_epi8(offset_bytes, _mm512_slli_epi16(scale_bytes, 3)); /* 8 · 15 stays within its byte */
}

/* scale · q + offset of bytes: 15 · 15 fits a byte, so that a product of 16 bits is that of both its bytes. */
FN void put_bytes(char *out, __m512i q, __m512i scales, __m512i offsets) {
    _mm512_storeu_si512(out, _mm512_add_epi8(_mm512_mullo_epi16(q, scales), offsets));
}

ENTRY void unpack_block_avx512(const struct quantized *p, int64_t block, char *out) {
    const char *group = p->weight + block * p->block_bytes;
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < p->inner; i += GROUP, group += GROUP_BYTES, out += GROUP * COLUMNS) {
        NAME(prefetch)(group, GROUP_BYTES);
        for (int v = 0; v < COLUMNS / 16; v++) {
            __m512i scales, offsets;
            grid_of(group + 32 * v, &scales, &offsets);
            const char *numbers = group + 2 * COLUMNS + 64 * v;
            char *to = out + 64 * v;
#pragma GCC unroll 4
            for (int j = 0; j < GROUP / 8; j++, numbers += 4 * COLUMNS, to += 8 * COLUMNS) {
                const __m512i eights = _mm512_loadu_si512(numbers);
                put_bytes(to, _mm512_and_si512(eights, low), scales, offsets);
                put_bytes(to + 4 * COLUMNS, _mm512_and_si512(_mm512_srli_epi16(eights, 4), low), scales, offsets);
            }
        }
    }
}

#endif
