/* Rows [first, last); compiled once a set of vector instructions, see vectors.h. Rounds where torch rounds: the sum with the
   residual, and the normalised number before the weight. */

FN void NAME(norm_row)(const struct norm *n, float eps, int64_t begin, const int is_bf16) {
    VEC sum = NAME(zero)(), other = NAME(zero)();
    for (int64_t i = 0; i < n->width; i += 16)
        for (int64_t j = i; j < i + 16; j += LANES) {
            VEC x = NAME(load)(n->x, begin + j, is_bf16);
            if (n->added) {
                x = NAME(add)(x, NAME(load)(n->added, begin + j, is_bf16));
                if (is_bf16) x = NAME(as_bf16)(x);
                NAME(store)(n->x, begin + j, is_bf16, x);
            }
            if (i & 16) sum = NAME(fma)(x, x, sum);
            else other = NAME(fma)(x, x, other);
        }
    const VEC scale = NAME(all)(1.0f / sqrtf(NAME(sum)(NAME(add)(sum, other)) / (float)n->width + eps));
    for (int64_t i = 0; i < n->width; i += LANES) {
        VEC y = NAME(mul)(NAME(load)(n->x, begin + i, is_bf16), scale);
        if (is_bf16) y = NAME(as_bf16)(y);
        NAME(store)(n->out, begin + i, is_bf16, NAME(mul)(y, NAME(load)(n->weight, i, is_bf16)));
    }
}

ENTRY void NAME(norm_rows)(const struct norm *n, float eps, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (n->is_bf16) NAME(norm_row)(n, eps, row * n->width, 1);
        else NAME(norm_row)(n, eps, row * n->width, 0);
}
