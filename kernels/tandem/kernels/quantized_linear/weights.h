/* Quantises columns of a weight; compiled once a set of vector instructions. */

/* Rows are `columns` of the product: [columns][inner] in float32 or bfloat16. */
FN float NAME(size_of)(const struct weight *w, int64_t column) {
    const char *x = w->weight + column * w->inner * (w->is_bf16 ? 2 : 4);
    VEC most = NAME(zero)();
    for (int64_t i = 0; i < w->inner; i += LANES)
        most = NAME(most)(most, NAME(size)(NAME(load_some)(x, i, w->inner, (int)w->is_bf16)));
    return NAME(largest)(most);
}

ENTRY void NAME(to_bytes)(const struct weight *w, int64_t first, int64_t last, float *room) {
    (void)room;
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

FN void NAME(load_group)(struct NAME(group) *g, const struct weight *w, const float *targets, int64_t from) {
    for (int v = 0; v < GROUP / LANES; v++) {
        const int64_t i = from + v * LANES;
        float inside[LANES], importance[LANES];
        for (int j = 0; j < LANES; j++) {
            inside[j] = i + j < w->inner ? 1.0f : 0.0f;
            importance[j] = w->importance && i + j < w->inner ? w->importance[i + j] : inside[j];
        }
        g->inside[v] = NAME(load_f32)(inside), g->importance[v] = NAME(load_f32)(importance);
        g->target[v] = NAME(load_f32)(targets + i);
    }
}

/* A product's column while it becomes one of 4 bits. */
struct NAME(column) { float top, by; double met, own, total; /* so that the order of additions changes no scale */ };

/* Targets [padded]: the column's numbers, its largest TOP_NUMBER; zeros behind the last. */
FN struct NAME(column) NAME(begin_column)(const struct weight *w, int64_t column, float *targets, int64_t padded) {
    const char *x = w->weight + column * w->inner * (w->is_bf16 ? 2 : 4);
    const float top = NAME(size_of)(w, column), by = top < LEAST_WEIGHT ? 0.0f : TOP_NUMBER / top;
    for (int64_t i = 0; i < padded; i += LANES) {
        VEC target = NAME(zero)();
        if (i < w->inner) target = NAME(mul)(NAME(load_some)(x, i, w->inner, (int)w->is_bf16), NAME(all)(by));
        NAME(store_f32)(targets + i, target);
    }
    return (struct NAME(column)){.top = top, .by = by};
}

/* Each number's error goes to the targets behind it in the group, and to `errors` [GROUP]. */
FN void NAME(feed_back)(struct NAME(group) *g, const float *feedback, int64_t stride, float *errors) {
    float targets[GROUP];
    for (int v = 0; v < GROUP / LANES; v++) NAME(store_f32)(targets + v * LANES, g->target[v]);
    for (int k = 0; k < GROUP; k++) {
        const float q = fmaxf(-8.0f, fminf(7.0f, rintf((targets[k] - g->offset) * (1.0f / g->scale))));
        errors[k] = targets[k] - (q * g->scale + g->offset);
        for (int j = k + 1; j < GROUP; j++) targets[j] -= errors[k] * feedback[k * stride + j];
    }
    for (int v = 0; v < GROUP / LANES; v++) g->target[v] = NAME(load_f32)(targets + v * LANES);
}

FN void NAME(keep_group)(const struct weight *w, struct NAME(column) *c, const struct NAME(group) *g, int64_t column, int64_t from) {
    char *group = w->numbers + column / COLUMNS * w->block_bytes + from / GROUP * GROUP_BYTES;
    uint8_t numbers[GROUP];
    for (int v = 0; v < GROUP / LANES; v++) {
        const VEC q = NAME(numbers_of)(g, v, g->scale, g->offset);
        const VEC value = NAME(mul)(NAME(fma)(q, NAME(all)(g->scale), NAME(all)(g->offset)), g->inside[v]);
        float targets[LANES], values[LANES], importance[LANES];
        NAME(store_f32)(targets, g->target[v]), NAME(store_f32)(values, value);
        NAME(store_f32)(importance, g->importance[v]);
        for (int k = 0; k < LANES; k++) {
            const double weighted = (double)values[k] * importance[k];
            c->met += targets[k] * weighted, c->own += values[k] * weighted, c->total += values[k];
        }
        NAME(store_numbers)(numbers + v * LANES, q, 0);
    }
    group[column % COLUMNS * 2] = (char)g->scale, group[column % COLUMNS * 2 + 1] = (char)g->offset;
    char *packed = group + 2 * COLUMNS + column % COLUMNS * 4;
    for (int j = 0; j < GROUP; j += 8)
        for (int k = 0; k < 4; k++)
            packed[j / 8 * 4 * COLUMNS + k] = (char)(((numbers[j + k] + 8) & 15) | ((numbers[j + 4 + k] + 8) & 15) << 4);
}

FN void NAME(end_column)(const struct weight *w, const struct NAME(column) *c, int64_t column) {
    w->sums[column] = -(int32_t)c->total;
    /* Least squares: the scale that fits the chosen numbers best. Targets that took errors in are met as they are. */
    w->scales[column] = w->feedback && c->by > 0 ? c->top / TOP_NUMBER : c->own > 0 ? (float)(c->top / (double)TOP_NUMBER * (c->met / c->own)) : 0.0f;
}

/* Errors [count][GROUP] of a group go to the targets [count][padded] behind it. */
FN void NAME(feed_on)(const struct weight *w, const float *errors, float *targets, int64_t count, int64_t padded, int64_t from) {
    for (int64_t i = from + GROUP; i < padded; i += GROUP)
        for (int64_t c = 0; c < count; c++) {
            VEC sum[GROUP / LANES];
            for (int v = 0; v < GROUP / LANES; v++) sum[v] = NAME(load_f32)(targets + c * padded + i + v * LANES);
            for (int k = 0; k < GROUP; k++) {
                const VEC by = NAME(all)(-errors[c * GROUP + k]);
                const float *row = w->feedback + (from + k) * padded + i;
                for (int v = 0; v < GROUP / LANES; v++) sum[v] = NAME(fma)(by, NAME(load_f32)(row + v * LANES), sum[v]);
            }
            for (int v = 0; v < GROUP / LANES; v++) NAME(store_f32)(targets + c * padded + i + v * LANES, sum[v]);
        }
}

/* `room` [TOGETHER][inner up to whole groups]: so many columns share what they read of the feedback. */
ENTRY void NAME(to_nibbles)(const struct weight *w, int64_t first, int64_t last, float *room) {
    const int64_t padded = (w->inner + GROUP - 1) / GROUP * GROUP;
    for (int64_t column = first; column < last; column += TOGETHER) {
        const int64_t count = last - column < TOGETHER ? last - column : TOGETHER;
        struct NAME(column) columns[TOGETHER];
        float errors[TOGETHER * GROUP];
        for (int64_t c = 0; c < count; c++)
            columns[c] = NAME(begin_column)(w, column + c, room + c * padded, padded);
        for (int64_t i = 0; i < padded; i += GROUP) {
            for (int64_t c = 0; c < count; c++) {
                struct NAME(group) g;
                NAME(load_group)(&g, w, room + c * padded, i);
                NAME(find_grid)(&g);
                if (w->feedback) NAME(feed_back)(&g, w->feedback + i * padded + i, padded, errors + c * GROUP);
                NAME(keep_group)(w, &columns[c], &g, column + c, i);
            }
            if (w->feedback) NAME(feed_on)(w, errors, room, count, padded, i);
        }
        for (int64_t c = 0; c < count; c++) NAME(end_column)(w, &columns[c], column + c);
    }
}
