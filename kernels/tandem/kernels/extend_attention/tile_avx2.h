/* Packing keys and values, and one tile of queries over them, with AVX2: in float32, for the unit has no products of
   bfloat16.

   Scores lie transposed, [key][query], as in tile.h: 24 queries are three vectors, which meet four keys, or four numbers of
   a value, at a time, so that twelve sums stay in registers. */

#pragma once

#include "extend.h"

#define VECTORS 3
#define FEW 4

/* Keys of one head and its values, both as [keys][width], zeros behind the last. Part: STEP keys of a head. */
ENTRY void NAME(pack_part)(const struct extend *e, int64_t part) {
    const int64_t steps = e->padded / STEP, head = part / steps, step = part % steps, width = e->width;
    const int64_t length = e->lens[e->sequence], first = e->begin + step * STEP;
    const int32_t *table = e->table + e->sequence * e->table_stride;
    float *key = (float *)e->keys + (head * e->padded + step * STEP) * width;
    float *value = (float *)e->values + (head * e->padded + step * STEP) * width;
    for (int64_t token = first; token < first + STEP; token++, key += width, value += width) {
        if (token < e->oldest || token >= length) {
            memset(key, 0, sizeof *key * width), memset(value, 0, sizeof *value * width);
            continue;
        }
        const char *row = e->pool + head * e->head_bytes + table[token / e->block_tokens] * e->block_bytes +
                          token % e->block_tokens * width * 2;
        for (int64_t d = 0; d < width; d += LANES) {
            NAME(store_f32)(key + d, NAME(load)(row, d, 1));
            NAME(store_f32)(value + d, NAME(load)(row + e->plane_bytes, d, 1));
        }
    }
}

/* c[FEW][VECTORS] = Σ of left(i, few) · right[i], or is added to. `left` goes on by `step` numbers with i, and by `few` from
   one of four to the next. */
FN void NAME(few_sums)(float *c, int is_added, const float *left, int64_t step, int64_t few, const float *right, int64_t count) {
    VEC sum[FEW][VECTORS];
    for (int f = 0; f < FEW; f++)
        for (int v = 0; v < VECTORS; v++)
            sum[f][v] = is_added ? NAME(load_f32)(c + f * AVX2_ROWS + v * LANES) : NAME(zero)();
    for (int64_t i = 0; i < count; i++, left += step, right += AVX2_ROWS) {
        VEC here[VECTORS];
        for (int v = 0; v < VECTORS; v++) here[v] = NAME(load_f32)(right + v * LANES);
        for (int f = 0; f < FEW; f++) {
            const VEC one = NAME(all)(left[f * few]);
            for (int v = 0; v < VECTORS; v++) sum[f][v] = NAME(fma)(one, here[v], sum[f][v]);
        }
    }
    for (int f = 0; f < FEW; f++)
        for (int v = 0; v < VECTORS; v++) NAME(store_f32)(c + f * AVX2_ROWS + v * LANES, sum[f][v]);
}

/* Where queries of a tile stand in the context, and what each of them has come to: a vector for eight of them. */
struct NAME(state) { __m256i place[VECTORS]; VEC most[VECTORS], total[VECTORS]; };

/* 2^a within 3e-6 of it, relatively; a is at most 0, and nothing below 2^-126; NaN stays NaN. */
FN VEC NAME(power)(VEC a) {
    const VEC x = NAME(most)(NAME(all)(-126.0f), a), whole = _mm256_floor_ps(x), above = _mm256_sub_ps(x, whole);
    VEC p = NAME(all)(1.3520603197e-2f);
    p = NAME(fma)(p, above, NAME(all)(5.2037428775e-2f));
    p = NAME(fma)(p, above, NAME(all)(2.4142749325e-1f));
    p = NAME(fma)(p, above, NAME(all)(6.9300662066e-1f));
    p = NAME(fma)(p, above, NAME(all)(1.0000025181f));
    return NAME(times_power)(p, whole);
}

/* As `cap` in tile.h. */
FN void NAME(cap)(const struct extend *e, float *scores, int64_t count) {
    const VEC one = NAME(all)(1), two = NAME(all)(2), twice = NAME(all)((float)(2 * e->scale / e->softcap));
    const VEC most = NAME(all)((float)(e->softcap / e->scale));
    for (int64_t i = 0; i < count * AVX2_ROWS; i += LANES) {
        const VEC power = NAME(exp)(NAME(mul)(NAME(load_f32)(scores + i), twice));
        const VEC part = NAME(divide)(two, NAME(add)(power, one));
        NAME(store_f32)(scores + i, NAME(mul)(most, _mm256_sub_ps(one, part)));
    }
}

/* Scores of `count` keys, from `key` on, become weights against the new maxima. `kept`: what is left of everything before. */
FN void NAME(weigh)(const struct extend *e, struct NAME(state) *s, float *scores, int64_t key, int64_t count,
                    const int IS_MASKED, VEC kept[VECTORS]) {
    const VEC scale = NAME(all)(e->scale * 1.44269504f), hidden = NAME(all)(LEAST);
    const __m256i window = _mm256_set1_epi32((int32_t)e->window);
    for (int v = 0; v < VECTORS; v++) {
        VEC most = s->most[v], total = NAME(zero)();
        for (int64_t k = 0; k < count; k++) {
            VEC score = NAME(load_f32)(scores + k * AVX2_ROWS + v * LANES);
            if (IS_MASKED) {
                const __m256i at = _mm256_set1_epi32((int32_t)(key + k));
                __m256i out = _mm256_cmpgt_epi32(at, s->place[v]);
                if (e->window) /* seen only if at > place - window */
                    out = _mm256_or_si256(out, _mm256_xor_si256(_mm256_cmpgt_epi32(at, _mm256_sub_epi32(s->place[v], window)),
                                                                _mm256_set1_epi32(-1)));
                score = _mm256_blendv_ps(score, hidden, _mm256_castsi256_ps(out));
                NAME(store_f32)(scores + k * AVX2_ROWS + v * LANES, score);
            }
            most = NAME(most)(score, most); /* in this order NaN is left out */
        }
        kept[v] = NAME(exp)(NAME(mul)(_mm256_sub_ps(s->most[v], most), NAME(all)(e->scale))); /* of 0 it is 1 */
        for (int64_t k = 0; k < count; k++) {
            float *score = scores + k * AVX2_ROWS + v * LANES;
            const VEC weight = NAME(power)(NAME(mul)(_mm256_sub_ps(NAME(load_f32)(score), most), scale));
            total = NAME(add)(total, weight);
            NAME(store_f32)(score, weight);
        }
        s->most[v] = most, s->total[v] = NAME(fma)(s->total[v], kept[v], total);
    }
}

FN void NAME(write_out)(const struct extend *e, int64_t head, int64_t first, int64_t count, const struct NAME(state) *s,
                        const float *mixed) {
    const __m256i places = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(AVX2_ROWS));
    float most[AVX2_ROWS], total[AVX2_ROWS];
    for (int v = 0; v < VECTORS; v++) NAME(store_f32)(most + v * LANES, s->most[v]), NAME(store_f32)(total + v * LANES, s->total[v]);
    for (int64_t r = 0; r < count; r++) {
        const int64_t row = first + r, query_head = head * e->group + row % e->group;
        float sum = total[r];
        if (e->sinks) sum += expf(e->sinks[query_head] - most[r] * e->scale);
        const VEC share = NAME(all)(1.0f / sum);
        uint16_t *out = e->out + ((e->starts[e->sequence] + row / e->group) * e->kv_heads * e->group + query_head) * e->width;
        for (int64_t d = 0; d < e->width; d += LANES)
            NAME(store_bf16)(out + d, NAME(mul)(_mm256_i32gather_ps(mixed + d * AVX2_ROWS + r, places, 4), share));
    }
}

/* As `attend_tile` in tile.h. */
ENTRY void NAME(attend_tile)(const struct extend *e, int64_t index) {
    const int64_t tokens = e->starts[e->sequence + 1] - e->starts[e->sequence], past = e->lens[e->sequence] - tokens;
    const int64_t head = index % e->kv_heads, first = (e->tiles - 1 - index / e->kv_heads) * AVX2_ROWS, width = e->width;
    const int64_t rows = tokens * e->group, count = rows - first < AVX2_ROWS ? rows - first : AVX2_ROWS;
    float queries[MOST_WIDTH * AVX2_ROWS] __attribute__((aligned(64))), mixed[MOST_WIDTH * AVX2_ROWS] __attribute__((aligned(64)));
    float scores[SPAN * AVX2_ROWS] __attribute__((aligned(64)));
    struct NAME(state) s;
    int32_t places[AVX2_ROWS];
    for (int r = 0; r < AVX2_ROWS; r++) places[r] = (int32_t)(past + (first + (r < count ? r : count - 1)) / e->group);
    for (int v = 0; v < VECTORS; v++) {
        s.place[v] = _mm256_loadu_si256((const void *)(places + v * LANES));
        s.most[v] = NAME(all)(LEAST), s.total[v] = NAME(zero)();
    }
    for (int64_t r = 0; r < AVX2_ROWS; r++) {
        const int64_t row = first + (r < count ? r : count - 1), token = e->starts[e->sequence] + row / e->group;
        const uint16_t *q = e->q + token * e->q_stride + (head * e->group + row % e->group) * e->head_stride;
        for (int64_t d = 0; d < width; d++) {
            const uint32_t bits = (uint32_t)q[d] << 16;
            memcpy(queries + d * AVX2_ROWS + r, &bits, sizeof bits);
        }
    }
    const int64_t end = places[AVX2_ROWS - 1] + 1;
    int64_t low = e->window && places[0] - e->window + 1 > 0 ? places[0] - e->window + 1 : 0;
    low = (low < e->begin ? e->begin : low) / STEP * STEP;
    for (int is_first = 1; low < end; low += SPAN, is_first = 0) {
        const int64_t left = (end - low + FEW - 1) / FEW * FEW, keys = left < SPAN ? left : SPAN;
        const float *key = (const float *)e->keys + (head * e->padded + low - e->begin) * width;
        const float *value = (const float *)e->values + (head * e->padded + low - e->begin) * width;
        for (int64_t k = 0; k < keys; k += FEW)
            NAME(few_sums)(scores + k * AVX2_ROWS, 0, key + k * width, 1, width, queries, width);
        if (e->softcap) NAME(cap)(e, scores, keys);
        VEC kept[VECTORS];
        const int is_seen = low + keys <= places[0] + 1 && (!e->window || low > places[AVX2_ROWS - 1] - e->window);
        if (is_seen) NAME(weigh)(e, &s, scores, low, keys, 0, kept);
        else NAME(weigh)(e, &s, scores, low, keys, 1, kept);
        if (!is_first)
            for (int64_t d = 0; d < width * AVX2_ROWS; d += AVX2_ROWS)
                for (int v = 0; v < VECTORS; v++)
                    NAME(store_f32)(mixed + d + v * LANES, NAME(mul)(NAME(load_f32)(mixed + d + v * LANES), kept[v]));
        for (int64_t d = 0; d < width; d += FEW)
            NAME(few_sums)(mixed + d * AVX2_ROWS, !is_first, value + d, width, 1, scores, keys);
    }
    NAME(write_out)(e, head, first, count, &s, mixed);
}

#undef VECTORS
#undef FEW
