/* Quantises columns of a weight; compiled once a set of vector instructions. */

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

struct NAME(group) {
    VEC target[GROUP / LANES], inside[GROUP / LANES]; /* 1 where there is a number, 0 behind the last */
    VEC importance[GROUP / LANES];                    /* of a number's squared error; 0 behind the last */
    float scale, offset;
};

/* q of a vector of targets: whole numbers from -8 to 7. */
FN VEC NAME(numbers_of)(const struct NAME(group) *g, int v, float scale, float offset) {
    return NAME(nearest)(NAME(add)(g->target[v], NAME(all)(-offset)), 1.0f / scale);
}

/* The weighted squared error of scale · q + offset; the offset that would be best with these q goes to `next`. */
FN float NAME(error_of)(const struct NAME(group) *g, float scale, float offset, float *next) {
    VEC sum = NAME(zero)(), total = NAME(zero)(), count = NAME(zero)();
    for (int v = 0; v < GROUP / LANES; v++) {
        const VEC rest = NAME(fma)(NAME(numbers_of)(g, v, scale, offset), NAME(all)(-scale), g->target[v]);
        const VEC off = NAME(add)(rest, NAME(all)(-offset)), by = g->importance[v];
        sum = NAME(fma)(NAME(mul)(off, by), off, sum), total = NAME(fma)(rest, by, total), count = NAME(add)(count, by);
    }
    /* So that numbers stay from -127 to 127. */
    *next = fminf(MOST_NUMBER - 7 * scale, fmaxf(8 * scale - MOST_NUMBER, rintf(NAME(sum)(total) / NAME(sum)(count))));
    return NAME(sum)(sum);
}

/* The scale, from 1 to 15, and the offset with which whole numbers from -8 to 7 come nearest to a group's targets. */
FN void NAME(find_grid)(struct NAME(group) *g) {
    float low = INFINITY, high = -INFINITY, least = INFINITY;
    for (int v = 0; v < GROUP / LANES; v++) {
        float all[LANES];
        NAME(store_f32)(all, g->target[v]);
        for (int i = 0; i < LANES; i++) low = fminf(low, all[i]), high = fmaxf(high, all[i]);
    }
    const float step = (high - low) / 15.0f, last = fminf(15.0f, fmaxf(1.0f, ceilf(MOST_SHARE_OF_STEP * step)));
    for (float scale = fminf(15.0f, fmaxf(1.0f, floorf(LEAST_SHARE_OF_STEP * step))); scale <= last; scale++) {
        const float starts[] = {(low + high + scale) / 2, low + 8 * scale, high - 7 * scale};
        for (int start = 0; start < 3; start++) {
            float offset = rintf(starts[start]), next;
            for (int turn = 0; turn < 2; turn++) NAME(error_of)(g, scale, offset, &next), offset = next;
            const float error = NAME(error_of)(g, scale, offset, &next);
            if (error < least) least = error, g->scale = scale, g->offset = offset;
        }
    }
}

FN void NAME(load_group)(struct NAME(group) *g, const struct weight *w, int64_t column, int64_t from, float by) {
    const char *x = w->weight + column * w->inner * (w->is_bf16 ? 2 : 4);
    for (int v = 0; v < GROUP / LANES; v++) {
        const int64_t i = from + v * LANES;
        float inside[LANES], importance[LANES];
        for (int j = 0; j < LANES; j++) {
            inside[j] = i + j < w->inner ? 1.0f : 0.0f;
            importance[j] = w->importance && i + j < w->inner ? w->importance[i + j] : inside[j];
        }
        g->inside[v] = NAME(load_f32)(inside), g->importance[v] = NAME(load_f32)(importance), g->target[v] = NAME(zero)();
        if (i < w->inner) g->target[v] = NAME(mul)(NAME(load_some)(x, i, w->inner, (int)w->is_bf16), NAME(all)(by));
    }
}

ENTRY void NAME(to_nibbles)(const struct weight *w, int64_t first, int64_t last) {
    for (int64_t column = first; column < last; column++) {
        const float top = NAME(size_of)(w, column), by = top < LEAST_WEIGHT ? 0.0f : TOP_NUMBER / top;
        double met = 0, own = 0, total = 0; /* so that the order of additions changes no scale */
        char *group = w->numbers + column / COLUMNS * w->block_bytes;
        for (int64_t i = 0; i < w->inner; i += GROUP, group += GROUP_BYTES) {
            struct NAME(group) g;
            NAME(load_group)(&g, w, column, i, by);
            NAME(find_grid)(&g);
            uint8_t numbers[GROUP];
            for (int v = 0; v < GROUP / LANES; v++) {
                const VEC q = NAME(numbers_of)(&g, v, g.scale, g.offset);
                const VEC value = NAME(mul)(NAME(fma)(q, NAME(all)(g.scale), NAME(all)(g.offset)), g.inside[v]);
                float targets[LANES], values[LANES], importance[LANES];
                NAME(store_f32)(targets, g.target[v]), NAME(store_f32)(values, value);
                NAME(store_f32)(importance, g.importance[v]);
                for (int k = 0; k < LANES; k++) {
                    const double weighted = (double)values[k] * importance[k];
                    met += targets[k] * weighted, own += values[k] * weighted, total += values[k];
                }
                NAME(store_numbers)(numbers + v * LANES, q, 0);
            }
            group[column % COLUMNS * 2] = (char)g.scale, group[column % COLUMNS * 2 + 1] = (char)g.offset;
            char *packed = group + 2 * COLUMNS + column % COLUMNS * 4;
            for (int j = 0; j < GROUP; j += 8)
                for (int k = 0; k < 4; k++)
                    packed[j / 8 * 4 * COLUMNS + k] = (char)(((numbers[j + k] + 8) & 15) | ((numbers[j + 4 + k] + 8) & 15) << 4);
        }
        w->sums[column] = -(int32_t)total;
        /* Least squares: the scale that fits the chosen numbers best. */
        w->scales[column] = own > 0 ? (float)(top / (double)TOP_NUMBER * (met / own)) : 0.0f;
    }
}
