/* Rows [first, last); compiled once a set of vector instructions, see vectors.h. Both products are rounded to the type
   before they are added, as in torch. */

FN VEC NAME(turned)(const struct rope_args *t, VEC x, VEC swapped, int64_t place, const int is_bf16) {
    VEC a = NAME(mul)(x, NAME(load)(t->cos, place, is_bf16)), b = NAME(mul)(swapped, NAME(load)(t->sin, place, is_bf16));
    if (is_bf16) a = NAME(as_bf16)(a), b = NAME(as_bf16)(b);
    return NAME(add)(a, b);
}

FN void NAME(turn_row)(const struct rope_args *t, int64_t row, const int is_bf16) {
    const int64_t half = t->width / 2, table = row * t->table_stride;
    for (int64_t head = 0; head < t->heads; head++) {
        const int64_t begin = row * t->x_stride + head * t->width;
        for (int64_t i = 0; i < half; i += LANES) {
            const VEC low = NAME(load)(t->x, begin + i, is_bf16), high = NAME(load)(t->x, begin + half + i, is_bf16);
            NAME(store)(t->x, begin + i, is_bf16, NAME(turned)(t, low, high, table + i, is_bf16));
            NAME(store)(t->x, begin + half + i, is_bf16, NAME(turned)(t, high, low, table + half + i, is_bf16));
        }
    }
}

ENTRY void NAME(turn_rows)(const struct rope_args *t, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (t->is_bf16) NAME(turn_row)(t, row, 1);
        else NAME(turn_row)(t, row, 0);
}
