/* Quantises columns of a weight, unpacks numbers of 4 bits to 8, and finishes oneDNN's products; compiled once a set of
   vector instructions. */

/* Rows are `columns` of the product: [columns][inner] in float32 or bfloat16. */
FN float NAME(size_of)(const struct weight *w, int64_t column) {
    const char *x = w->weight + column * w->inner * (w->is_bf16 ? 2 : 4);
    VEC most = NAME(zero)();
    for (int64_t i = 0; i < w->inner; i += LANES)
        most = NAME(most)(most, NAME(size)(NAME(load_some)(x, i, w->inner, (int)w->is_bf16)));
    return NAME(largest)(most);
}

ENTRY void NAME(to_bytes)(const struct weight *w, int64_t first, int64_t last) {
    for (int64_t column = first; column < last; column++) {
        const char *x = w->weight + column * w->inner * (w->is_bf16 ? 2 : 4);
        uint8_t *numbers = (uint8_t *)w->numbers + column * w->inner;
        const float top = NAME(size_of)(w, column), by = top < LEAST_WEIGHT ? 0.0f : 127.0f / top;
        w->scales[column] = by == 0.0f ? 0.0f : top / 127.0f;
        for (int64_t i = 0; i < w->inner; i += LANES) {
            const VEC scaled = NAME(mul)(NAME(load_some)(x, i, w->inner, (int)w->is_bf16), NAME(all)(by));
            if (i + LANES <= w->inner) NAME(store_numbers)(numbers + i, scaled, 0);
            else {
                uint8_t some[LANES];
                NAME(store_numbers)(some, scaled, 0);
                memcpy(numbers + i, some, (size_t)(w->inner - i));
            }
        }
    }
}

FN VEC NAME(nearest)(VEC target, float by) {
    return NAME(most)(NAME(all)(-8.0f), NAME(least)(NAME(all)(7.0f), NAME(whole)(NAME(mul)(target, NAME(all)(by)))));
}

/* The scale, from -15 to 15, with which whole numbers from -8 to 7 come nearest to a group's targets. */
FN int NAME(best_scale)(const VEC *target) {
    VEC most = NAME(zero)();
    for (int v = 0; v < GROUP / LANES; v++) most = NAME(most)(most, NAME(size)(target[v]));
    const float top = NAME(largest)(most) / 8.0f;
    if (top < 1.0f / 64) return 0;
    int low = (int)(LEAST_SHARE_OF_TOP * top), high = (int)ceilf(MOST_SHARE_OF_TOP * top), best = 0;
    if (low < 1) low = 1;
    if (high > 15) high = 15;
    float least = INFINITY;
    for (int size = low; size <= high; size++)
        for (int scale = -size; scale <= size; scale += 2 * size) {
            VEC sum = NAME(zero)();
            for (int v = 0; v < GROUP / LANES; v++) {
                const VEC off = NAME(fma)(NAME(nearest)(target[v], 1.0f / (float)scale), NAME(all)((float)-scale), target[v]);
                sum = NAME(fma)(off, off, sum);
            }
            const float error = NAME(sum)(sum);
            if (error < least) least = error, best = scale;
        }
    return best;
}

ENTRY void NAME(to_nibbles)(const struct weight *w, int64_t first, int64_t last) {
    for (int64_t column = first; column < last; column++) {
        const char *x = w->weight + column * w->inner * (w->is_bf16 ? 2 : 4);
        const float top = NAME(size_of)(w, column), by = top < LEAST_WEIGHT ? 0.0f : 120.0f / top;
        VEC met = NAME(zero)(), own = NAME(zero)(), total = NAME(zero)();
        for (int64_t g = 0; g * GROUP < w->inner; g++) {
            VEC target[GROUP / LANES];
            for (int v = 0; v < GROUP / LANES; v++) {
                const int64_t i = g * GROUP + v * LANES;
                target[v] = NAME(all)(0.0f);
                if (i < w->inner) target[v] = NAME(mul)(NAME(load_some)(x, i, w->inner, (int)w->is_bf16), NAME(all)(by));
            }
            const int scale = NAME(best_scale)(target);
            uint8_t numbers[GROUP];
            for (int v = 0; v < GROUP / LANES; v++) {
                const VEC q = scale ? NAME(nearest)(target[v], 1.0f / (float)scale) : NAME(zero)();
                const VEC value = NAME(mul)(q, NAME(all)((float)scale));
                met = NAME(fma)(target[v], value, met), own = NAME(fma)(value, value, own), total = NAME(add)(total, value);
                NAME(store_numbers)(numbers + v * LANES, q, 0);
            }
            char *group = w->numbers + column / COLUMNS * w->block_bytes + g * GROUP_BYTES + column % COLUMNS;
            *group = (char)scale;
            group += COLUMNS + column % COLUMNS * 3;
            for (int j = 0; j < GROUP; j += 8)
                for (int i = 0; i < 4; i++)
                    group[j / 8 * 4 * COLUMNS + i] = (char)(((numbers[j + i] + 8) & 15) | ((numbers[j + 4 + i] + 8) & 15) << 4);
        }
        w->sums[column] = -(int32_t)NAME(sum)(total);
        const float norm = NAME(sum)(own); /* least squares: the scale that fits the chosen numbers best */
        w->scales[column] = norm > 0.0f ? top / 120.0f * (NAME(sum)(met) / norm) : 0.0f;
    }
}

/* Blocks [first, last) of nibbles as oneDNN packs bytes: [inner / 4][64][4] in a block. */
ENTRY void NAME(unpack)(const struct weight *w, int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block++) {
        const char *group = w->weight + block * w->block_bytes;
        char *out = w->numbers + block * w->out_block_bytes;
        for (int64_t i = 0; i < w->inner; i += GROUP, group += GROUP_BYTES) {
            int16_t scales[4 * COLUMNS];
            for (int c = 0; c < 4 * COLUMNS; c++) scales[c] = ((const int8_t *)group)[c / 4];
            for (int j = 0; j < GROUP / 8; j++, out += 8 * COLUMNS) {
                const uint8_t *both = (const uint8_t *)group + COLUMNS + j * 4 * COLUMNS;
                if (i + 8 * j >= w->inner) break;
                for (int c = 0; c < 4 * COLUMNS; c++) out[c] = (char)((int16_t)((both[c] & 15) - 8) * scales[c]);
                if (i + 8 * j + 4 >= w->inner) break;
                for (int c = 0; c < 4 * COLUMNS; c++) out[4 * COLUMNS + c] = (char)((int16_t)((both[c] >> 4) - 8) * scales[c]);
            }
        }
    }
}

/* What oneDNN multiplied, times the row's scale, and the bias: rows [first, last) of p->x, which has `planes` rows of
   columns for each, to p->out. */
FN void NAME(scale_row)(const struct quantized *p, int64_t row, const int from_bf16, const int is_bf16) {
    const VEC scale = NAME(all)(p->row_scales[row]);
    const char *x = p->x + row * p->planes * p->columns * (from_bf16 ? 2 : 4);
    char *out = p->out + row * p->columns * (is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < p->columns; i += LANES) {
        VEC sum = NAME(load_some)(x, i, p->columns, from_bf16);
        if (p->planes == 2) sum = NAME(fma)(sum, NAME(all)(PLANE), NAME(load_some)(x, p->columns + i, 2 * p->columns, from_bf16));
        VEC y = NAME(mul)(sum, scale);
        if (p->bias) y = NAME(add)(y, NAME(load_f32)((const float *)p->bias + i));
        if (i + LANES <= p->columns) NAME(store)(out, i, is_bf16, y);
        else {
            char some[4 * LANES];
            NAME(store)(some, 0, is_bf16, y);
            memcpy(out + i * (is_bf16 ? 2 : 4), some, (size_t)(p->columns - i) * (is_bf16 ? 2 : 4));
        }
    }
}

ENTRY void NAME(scale_rows)(const struct quantized *p, int64_t first, int64_t last, int from_bf16) {
    for (int64_t row = first; row < last; row++) {
        if (p->is_bf16 && from_bf16) NAME(scale_row)(p, row, 1, 1);
        else if (p->is_bf16) NAME(scale_row)(p, row, 0, 1);
        else NAME(scale_row)(p, row, 0, 0);
    }
}
