/* Packing keys and values, and one tile of queries over them; for AVX-512 with bfloat16.

   Scores lie transposed, [key][query]: the maxima and sums of 16 queries are a vector, which every key's scores meet
   whole, and two neighbouring keys' weights are a row of the second product's tiles as they are. */

#pragma once

#include "extend.h"

/* Keys of one head as [keys][width]; values as [keys / STEP][width][STEP], zeros behind the last. Part: STEP keys of a head. */
ENTRY void pack_part(const struct extend *e, int64_t part) {
    const int64_t steps = e->padded / STEP, head = part / steps, step = part % steps, width = e->width;
    const int64_t length = e->lens[e->sequence], first = e->begin + step * STEP;
    const int32_t *table = e->table + e->sequence * e->table_stride;
    uint16_t *keys = e->keys + (head * e->padded + step * STEP) * width;
    uint16_t *values = e->values + (head * e->padded + step * STEP) * width;
    const __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32(STEP / 2));
    for (int64_t t = 0; t < STEP; t += 2) {
        const uint16_t *rows[2] = {NULL, NULL};
        for (int i = 0; i < 2; i++) {
            const int64_t token = first + t + i;
            uint16_t *key = keys + (t + i) * width;
            if (token < e->oldest || token >= length) {
                memset(key, 0, sizeof *key * width);
                continue;
            }
            const char *row = e->pool + head * e->head_bytes + table[token / e->block_tokens] * e->block_bytes +
                              token % e->block_tokens * width * 2;
            memcpy(key, row, sizeof *key * width);
            rows[i] = (const uint16_t *)(row + e->plane_bytes);
        }
        for (int64_t d = 0; d < width; d += 16) {
            __m512i both = _mm512_setzero_si512();
            if (rows[0]) both = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(rows[0] + d)));
            if (rows[1]) {
                const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(rows[1] + d)));
                both = _mm512_or_si512(both, _mm512_slli_epi32(odd, 16));
            }
            _mm512_i32scatter_epi32(values + d * STEP + t, places, both, 4);
        }
    }
}

/* The queries of a tile as tiles of the first product's right side, [width / 32][2][16 pairs][16 queries][2]. */
FN void pack_queries(const struct extend *e, int64_t head, int64_t first, int64_t count, uint16_t *packed) {
    const __m512i places = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t row = first + r, token = e->starts[e->sequence] + row / e->group;
        const uint16_t *q = e->q + token * e->q_stride + (head * e->group + row % e->group) * e->head_stride;
        uint16_t *into = packed + r / 16 * TILE + r % 16 * 2;
        for (int64_t d = 0; d < e->width; d += 32, into += 2 * TILE)
            _mm512_i32scatter_epi32(into, places, r < count ? _mm512_loadu_si512(q + d) : _mm512_setzero_si512(), 4);
    }
}

/* Where queries of a tile stand in the context, and what each of them has come to: a vector for 16 of them. */
struct state { __m512i place[2]; __m512 most[2], total[2]; };

FN __mmask16 visible(const struct extend *e, const struct state *s, int v, int64_t key) {
    const __m512i at = _mm512_set1_epi32((int32_t)key);
    __mmask16 seen = _mm512_cmple_epi32_mask(at, s->place[v]);
    if (e->window)
        seen &= _mm512_cmpgt_epi32_mask(at, _mm512_sub_epi32(s->place[v], _mm512_set1_epi32((int32_t)e->window)));
    return seen;
}

/* Scores so that no one is beyond the cap: c · tanh(s · scale / c) / scale, and tanh x is 1 - 2 / (exp 2x + 1). */
FN void cap(const struct extend *e, float *scores, int64_t count) {
    const __m512 one = _mm512_set1_ps(1), two = _mm512_set1_ps(2);
    const __m512 twice = _mm512_set1_ps((float)(2 * e->scale / e->softcap));
    const __m512 most = _mm512_set1_ps((float)(e->softcap / e->scale));
    for (int64_t i = 0; i < count * ROWS; i += 16) {
        const __m512 power = exp_avx512(_mm512_mul_ps(_mm512_loadu_ps(scores + i), twice));
        const __m512 part = _mm512_div_ps(two, _mm512_add_ps(power, one));
        _mm512_storeu_ps(scores + i, _mm512_mul_ps(most, _mm512_sub_ps(one, part)));
    }
}

/* The first and the second half of a vector, in turns. */
static const uint16_t IN_TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

/* Scores of `count` keys, from `key` on, as weights against the new maxima, and as tiles of the second product's right
   side, [keys / STEP][2][16 pairs][16 queries][2]. `kept`: what is left of everything before. */
FN void weigh(const struct extend *e, struct state *s, const float *scores, int64_t key, int64_t count, const int IS_MASKED,
              uint16_t *weights, __m512 kept[2]) {
    const __m512i turns = _mm512_loadu_si512(IN_TURNS);
    const __m512 scale = _mm512_set1_ps(e->scale * 1.44269504f), hidden = _mm512_set1_ps(LEAST);
    for (int v = 0; v < 2; v++) {
        __m512 most = s->most[v];
        for (int64_t k = 0; k < count; k++) {
            __m512 score = _mm512_loadu_ps(scores + k * ROWS + 16 * v);
            if (IS_MASKED) score = _mm512_mask_mov_ps(hidden, visible(e, s, v, key + k), score);
            most = _mm512_max_ps(most, score);
        }
        /* 1 where the maximum stays: power_of_two(0) is above it, which would favour early keys, span by span. */
        const __mmask16 stays = _mm512_cmp_ps_mask(s->most[v], most, _CMP_EQ_OQ);
        const __m512 lost = power_of_two_avx512(_mm512_mul_ps(_mm512_sub_ps(s->most[v], most), scale));
        kept[v] = _mm512_mask_mov_ps(lost, stays, _mm512_set1_ps(1));
        s->most[v] = most;
        const __m512 down = _mm512_mul_ps(most, scale);
        __m512 total = _mm512_mul_ps(s->total[v], kept[v]);
        for (int64_t k = 0; k < count; k += 2) {
            __m512 pair[2];
            for (int i = 0; i < 2; i++) {
                pair[i] = power_of_two_avx512(_mm512_fmsub_ps(_mm512_loadu_ps(scores + (k + i) * ROWS + 16 * v), scale, down));
                if (IS_MASKED) pair[i] = _mm512_maskz_mov_ps(visible(e, s, v, key + k + i), pair[i]);
                total = _mm512_add_ps(total, pair[i]);
            }
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(pair[1], pair[0]);
            uint16_t *into = weights + (k / STEP * 2 + v) * TILE + k % STEP / 2 * 32;
            _mm512_storeu_si512(into, _mm512_permutexvar_epi16(turns, both));
        }
        s->total[v] = total;
    }
}

FN void write_out(const struct extend *e, int64_t head, int64_t first, int64_t count, const struct state *s,
                  const float *mixed) {
    const __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32(ROWS));
    float most[ROWS], total[ROWS];
    for (int v = 0; v < 2; v++) _mm512_storeu_ps(most + 16 * v, s->most[v]), _mm512_storeu_ps(total + 16 * v, s->total[v]);
    for (int64_t r = 0; r < count; r++) {
        const int64_t row = first + r, query_head = head * e->group + row % e->group;
        float sum = total[r];
        if (e->sinks) sum += expf(e->sinks[query_head] - most[r] * e->scale);
        const __m512 share = _mm512_set1_ps(1.0f / sum);
        const int64_t token = e->starts[e->sequence] + row / e->group;
        uint16_t *out = e->out + (token * e->kv_heads * e->group + query_head) * e->width;
        for (int64_t d = 0; d < e->width; d += 16) {
            const __m512 mix = _mm512_mul_ps(_mm512_i32gather_ps(places, mixed + d * ROWS + r, 4), share);
            _mm256_storeu_si256((void *)(out + d), (__m256i)_mm512_cvtneps_pbh(mix));
        }
    }
}

/* Tile `index`, of all heads' tiles of the sequence at work; those with the most keys come first. */
ENTRY void attend_tile(const struct extend *e, int64_t index, product_fn *product) {
    const int64_t tokens = e->starts[e->sequence + 1] - e->starts[e->sequence], length = e->lens[e->sequence];
    const int64_t head = index % e->kv_heads, first = (e->tiles - 1 - index / e->kv_heads) * ROWS, width = e->width;
    const int64_t rows = tokens * e->group, count = rows - first < ROWS ? rows - first : ROWS, past = length - tokens;
    uint16_t queries[MOST_WIDTH / 32 * 2 * TILE] __attribute__((aligned(64)));
    uint16_t weights[SPAN / STEP * 2 * TILE] __attribute__((aligned(64)));
    float scores[SPAN * ROWS] __attribute__((aligned(64))), mixed[MOST_WIDTH * ROWS] __attribute__((aligned(64)));
    struct state s;
    int32_t places[ROWS];
    for (int r = 0; r < ROWS; r++) places[r] = (int32_t)(past + (first + (r < count ? r : count - 1)) / e->group);
    for (int v = 0; v < 2; v++) {
        s.place[v] = _mm512_loadu_si512(places + 16 * v);
        s.most[v] = _mm512_set1_ps(LEAST), s.total[v] = _mm512_setzero_ps();
    }
    pack_queries(e, head, first, count, queries);
    const int64_t end = places[ROWS - 1] + 1;
    int64_t low = e->window && places[0] - e->window + 1 > 0 ? places[0] - e->window + 1 : 0;
    low = (low < e->begin ? e->begin : low) / STEP * STEP;
    for (int is_first = 1; low < end; low += SPAN, is_first = 0) {
        const int64_t left = (end - low + STEP - 1) / STEP * STEP, keys = left < SPAN ? left : SPAN;
        const uint16_t *key = e->keys + (head * e->padded + low - e->begin) * width;
        const uint16_t *value = e->values + (head * e->padded + low - e->begin) * width;
        for (int64_t k = 0; k < keys; k += 32)
            product(scores + k * ROWS, 0, key + k * width, 2 * width, 64, queries, width / 32);
        if (e->softcap) cap(e, scores, keys);
        __m512 kept[2];
        const int is_seen = low + keys <= places[0] + 1 && (!e->window || low > places[ROWS - 1] - e->window);
        if (is_seen) weigh(e, &s, scores, low, keys, 0, weights, kept);
        else weigh(e, &s, scores, low, keys, 1, weights, kept);
        if (!is_first && (_mm512_cmp_ps_mask(kept[0], _mm512_set1_ps(1), _CMP_NEQ_UQ) |
                          _mm512_cmp_ps_mask(kept[1], _mm512_set1_ps(1), _CMP_NEQ_UQ)))
            for (int64_t d = 0; d < width * ROWS; d += ROWS)
                for (int v = 0; v < 2; v++)
                    _mm512_storeu_ps(mixed + d + 16 * v, _mm512_mul_ps(_mm512_loadu_ps(mixed + d + 16 * v), kept[v]));
        for (int64_t d = 0; d < width; d += 32)
            product(mixed + d * ROWS, !is_first, value + d * STEP, 2 * STEP, 2 * STEP * width, weights, keys / STEP);
    }
    write_out(e, head, first, count, &s, mixed);
}
