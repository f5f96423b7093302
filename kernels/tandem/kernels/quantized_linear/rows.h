/* Rows as numbers of 8 or 16 bits and a scale each; compiled once a set of vector instructions, see vectors.h.

   For weights of 8 bits a byte is stored with 128 added, as u8 · s8 instructions want it; for those of 4 bits, which are
   the unsigned side there, as it is. A number of 16 bits is a byte in each of two rows, see PLANE. */

#define LEAST_ROW 1e-30f /* rows of smaller numbers are taken for zeros: their scale has no reciprocal */

/* So many bytes, 2 KiB ahead of p: where some columns of a block are read, its other lines are between, and the CPU foresees
   nothing. */
FN void NAME(prefetch)(const char *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(p + 2048 + i, _MM_HINT_T0);
}

FN VEC NAME(load_some)(const char *p, int64_t i, int64_t end, int is_bf16) {
    if (i + LANES <= end) return NAME(load)(p, i, is_bf16);
    float some[LANES] = {0};
    for (int64_t j = i; j < end; j++) {
        uint32_t bits = 0;
        if (is_bf16) bits = (uint32_t)((const uint16_t *)p)[j] << 16;
        else memcpy(&bits, (const float *)p + j, 4);
        memcpy(&some[j - i], &bits, 4);
    }
    return NAME(load_f32)(some);
}

#if ISA == 512
FN VEC NAME(size)(VEC x) { return _mm512_abs_ps(x); }
FN void NAME(most_bits)(uint16_t *most, const uint16_t *x) {
    const __m512i here = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
    _mm512_storeu_si512(most, _mm512_max_epu16(_mm512_loadu_si512(most), here));
}
FN void NAME(store_numbers)(uint8_t *p, VEC x, int flip) {
    const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
    _mm_storeu_si128((void *)p, _mm_xor_si128(bytes, _mm_set1_epi8((char)flip)));
}
FN int NAME(has_nan)(VEC x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
FN float NAME(largest)(VEC x) { return _mm512_reduce_max_ps(x); }
#else
FN VEC NAME(size)(VEC x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
FN void NAME(most_bits)(uint16_t *most, const uint16_t *x) {
    const __m256i here = _mm256_and_si256(_mm256_loadu_si256((const void *)x), _mm256_set1_epi16(0x7fff));
    _mm256_storeu_si256((void *)most, _mm256_max_epu16(_mm256_loadu_si256((const void *)most), here));
}
FN void NAME(store_numbers)(uint8_t *p, VEC x, int flip) {
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((void *)p, _mm_xor_si128(_mm_packs_epi16(half, half), _mm_set1_epi8((char)flip)));
}
FN int NAME(has_nan)(VEC x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
FN float NAME(largest)(VEC x) {
    float all[LANES], most = 0;
    NAME(store_f32)(all, x);
    for (int i = 0; i < LANES; i++) most = all[i] > most ? all[i] : most;
    return most;
}
#endif

/* The largest size among numbers, NaN if one has no size that a scale can hold. */
FN float NAME(top)(const char *x, int64_t count, const int is_bf16) {
    if (is_bf16) { /* as whole numbers: they are in the same order */
        uint16_t most[2 * LANES] = {0}, all = 0;
        const uint16_t *bits = (const uint16_t *)x;
        int64_t i = 0;
        for (; i + 2 * LANES <= count; i += 2 * LANES) NAME(most_bits)(most, bits + i);
        for (int j = 0; i + j < count; j++) most[j] = (bits[i + j] & 0x7fff) > most[j] ? bits[i + j] & 0x7fff : most[j];
        for (int j = 0; j < 2 * LANES; j++) all = most[j] > all ? most[j] : all;
        const uint32_t wide = (uint32_t)all << 16;
        float top;
        memcpy(&top, &wide, sizeof top);
        return all < 0x7f80 ? top : NAN;
    }
    VEC most = NAME(zero)(), odd = NAME(zero)();
    for (int64_t i = 0; i < count; i += LANES) {
        const VEC here = NAME(load_some)(x, i, count, 0);
        most = NAME(most)(most, NAME(size)(here));
        odd = NAME(fma)(here, NAME(zero)(), odd); /* NaN from NaN and from infinity */
    }
    return NAME(has_nan)(odd) ? NAN : NAME(largest)(most);
}

FN void NAME(sum_groups)(const struct quantized *p, const int8_t *bytes, int64_t row) {
    for (int64_t g = 0; g * GROUP < p->stride; g++) {
        int32_t sum = 0;
        for (int i = 0; i < GROUP; i++) sum += bytes[g * GROUP + i];
        p->group_sums[row * (p->stride / GROUP) + g] = sum;
    }
}

/* `count` numbers of x times `by` in `numbers`, and as many more as fill a vector. */
FN void NAME(put_numbers)(
    const struct quantized *p, const char *x, int64_t count, uint8_t *numbers, float by, int flip, const int is_bf16) {
    for (int64_t i = 0; i < count; i += LANES) {
        const VEC number = NAME(mul)(NAME(load_some)(x, i, count, is_bf16), NAME(all)(by));
        if (p->planes == 1) {
            NAME(store_numbers)(numbers + i, number, flip);
            continue;
        }
        const VEC whole = NAME(whole)(number), higher = NAME(whole)(NAME(mul)(whole, NAME(all)(1.0f / PLANE)));
        NAME(store_numbers)(numbers + i, higher, flip);
        NAME(store_numbers)(numbers + p->stride + i, NAME(fma)(higher, NAME(all)(-PLANE), whole), flip);
    }
}

/* The numbers of x's outliers, whole vectors of them, behind its other numbers. */
FN void NAME(put_outliers)(const struct quantized *p, const char *x, uint8_t *numbers, float by, int flip, const int is_bf16) {
    float again[MOST_OUTLIERS];
    const int64_t count = p->inner - p->x_inner;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        if (is_bf16) bits = (uint32_t)((const uint16_t *)x)[p->outliers[i]] << 16;
        else memcpy(&bits, (const float *)x + p->outliers[i], 4);
        memcpy(&again[i], &bits, 4);
        again[i] *= 1.0f / OUTLIER_STEP;
    }
    NAME(put_numbers)(p, (const char *)again, count, numbers + p->x_inner, by, flip, 0);
}

FN void NAME(quantize_row)(const struct quantized *p, int64_t row, const int is_bf16) {
    const char *x = p->x + row * p->x_stride * (is_bf16 ? 2 : 4);
    uint8_t *numbers = p->numbers + row * p->planes * p->stride;
    const float most = p->planes == 2 ? 127.0f * PLANE + 127.0f : 127.0f;
    const float top = NAME(top)(x, p->x_inner, is_bf16), by = top >= LEAST_ROW ? most / top : 0.0f;
    p->row_scales[row] = top < LEAST_ROW ? 0.0f : top / most;
    const int flip = has_bytes(p) ? 0x80 : 0;
    NAME(put_numbers)(p, x, p->x_inner, numbers, by, flip, is_bf16);
    if (p->x_inner < p->inner) NAME(put_outliers)(p, x, numbers, by, flip, is_bf16);
    for (int64_t plane = 0; plane < p->planes; plane++) {
        uint8_t *bytes = numbers + plane * p->stride;
        memset(bytes + p->inner, 0, (size_t)(p->stride - p->inner)); /* a tile may meet other numbers than zeros there */
        if (!flip) NAME(sum_groups)(p, (const int8_t *)bytes, row * p->planes + plane);
    }
}

ENTRY void NAME(quantize_rows)(const struct quantized *p, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (p->is_bf16) NAME(quantize_row)(p, row, 1);
        else NAME(quantize_row)(p, row, 0);
}

#undef LEAST_ROW
