/* Masks [first, last); compiled once a set of vector instructions, see vectors.h. A piece of eight tokens is a byte. */

#include <math.h>

ENTRY void NAME(forbid_rows)(const struct masks *m, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
        float *scores = m->scores + m->rows[i] * m->width;
        const uint8_t *bits = m->bits + i * m->stride;
        int64_t token = 0;
#if ISA == 512
        for (; token + 16 <= m->width; token += 16) {
            const __mmask16 forbidden = (__mmask16)~(bits[token / 8] | bits[token / 8 + 1] << 8);
            _mm512_mask_storeu_ps(scores + token, forbidden, _mm512_set1_ps(-INFINITY));
        }
#else
        const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        for (; token + 8 <= m->width; token += 8) {
            const __m256i mine = _mm256_and_si256(_mm256_set1_epi32(bits[token / 8]), lanes);
            _mm256_maskstore_ps(scores + token, _mm256_cmpeq_epi32(mine, _mm256_setzero_si256()), _mm256_set1_ps(-INFINITY));
        }
#endif
        for (; token < m->width; token++)
            if (!(bits[token / 8] >> token % 8 & 1)) scores[token] = -INFINITY;
    }
}
