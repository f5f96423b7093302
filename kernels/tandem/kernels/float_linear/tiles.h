/* Panels [first, last) of a product, compiled once a set of instructions, see cpu.c. Up to MOST_ROWS rows meet two vectors
   of columns at a time: so many sums stay in registers over a part of the inner dimension.

   Many rows are copied first, so that those of a tile lie side by side: [rows / size][inner][size]. */

#undef MOST_ROWS
#undef TWO
#if ISA == 512
#define MOST_ROWS 12
#define TWO 2 /* panels of two vectors */
#else
#define MOST_ROWS 6
#define TWO 1
#endif

/* A sum of the part from `at` on, of LANES columns or fewer at the end of a row. */
FN void NAME(put)(const struct product *p, int64_t row, int64_t column, int64_t at, VEC sum) {
    const int64_t count = p->columns - column;
    const float *bias = at + p->part >= p->inner && p->bias ? p->bias + column : NULL;
    float *out = p->out + row * p->columns + column;
    if (count >= LANES) {
        if (at) sum = NAME(add)(NAME(load_f32)(out), sum);
        if (bias) sum = NAME(add)(sum, NAME(load_f32)(bias));
        NAME(store_f32)(out, sum);
        return;
    }
    float sums[LANES];
    NAME(store_f32)(sums, sum);
    for (int64_t i = 0; i < count; i++) {
        const float here = at ? out[i] + sums[i] : sums[i];
        out[i] = bias ? here + bias[i] : here;
    }
}

/* ROWS rows from `row` on, of which there may be fewer, times VECTORS vectors from `panel` on: the part of the inner
   dimension from `at` on. The numbers of x are at x[r * ROW_STEP + i * STEP]. `ahead`: weights that come later, of which
   it fetches a line of cache for each `every` inner numbers. */
FN void NAME(tile)(const struct product *p, int64_t row, int64_t panel, int64_t at, const float *x, const int64_t ROW_STEP,
                   const int STEP, const char *ahead, int64_t every, const int ROWS, const int VECTORS) {
    const int64_t second = LANES == PANEL ? p->inner * PANEL : LANES;
    const int64_t count = p->inner - at < p->part ? p->inner - at : p->part;
    const float *weight = p->weight + (panel * p->inner + at) * PANEL;
    const int64_t rows = p->rows - row < ROWS ? p->rows - row : ROWS;
    for (int r = 0; r < rows; r++) /* what the sums go to, meanwhile */
        for (int v = 0; v < VECTORS; v++) __builtin_prefetch(p->out + (row + r) * p->columns + panel * PANEL + v * LANES, 1);
    VEC sum[MOST_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = NAME(zero)();
    for (int64_t i = 0; i < count; ahead += 64) {
        const int64_t until = count - i < every ? count : i + every;
        __builtin_prefetch(ahead, 0, 2);
        for (; i < until; i++, weight += PANEL, x += STEP) {
            if (STEP == 1 && fetched_ahead) {
                __builtin_prefetch((const char *)weight + fetched_ahead);
                if (VECTORS == 2 && LANES == PANEL) __builtin_prefetch((const char *)(weight + second) + fetched_ahead);
            }
            const VEC left = NAME(load_f32)(weight), right = VECTORS == 2 ? NAME(load_f32)(weight + second) : left;
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const VEC number = NAME(all)(x[r * ROW_STEP]);
                sum[r][0] = NAME(fma)(number, left, sum[r][0]);
                if (VECTORS == 2) sum[r][1] = NAME(fma)(number, right, sum[r][1]);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        NAME(put)(p, row + r, panel * PANEL, at, sum[r][0]);
        if (VECTORS == 2) NAME(put)(p, row + r, panel * PANEL + LANES, at, sum[r][1]);
    }
}

#define SIZES_UP_TO_6(f) f(1) f(2) f(3) f(4) f(5) f(6)
#if ISA == 512
#define SIZES(f) SIZES_UP_TO_6(f) f(7) f(8) f(9) f(10) f(11) f(12)
#else
#define SIZES(f) SIZES_UP_TO_6(f)
#endif

FN void NAME(direct)(const struct product *p, int64_t panel, int64_t at, const int VECTORS) {
    switch (p->rows) {
#define CASE(n) case n: NAME(tile)(p, 0, panel, at, p->x + at, p->x_stride, 1, (const char *)p->x, p->inner, n, VECTORS); break;
        SIZES_UP_TO_6(CASE)
#undef CASE
    }
}

FN void NAME(copied)(const struct product *p, int64_t row, int64_t panel, int64_t at, const float *x, const char *ahead,
                     int64_t every, int64_t size, const int VECTORS) {
    switch (size) {
#define CASE(n) case n: NAME(tile)(p, row, panel, at, x, 1, n, ahead, every, n, VECTORS); break;
        SIZES(CASE)
#undef CASE
    }
}

/* Tiles [first, last) of the rows, copied. */
ENTRY void NAME(copy)(const struct product *p, int64_t first, int64_t last) {
    const int64_t size = tile_rows(p);
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t begin = 0; begin < p->inner; begin += COPIED) {
            const int64_t end = begin + COPIED < p->inner ? begin + COPIED : p->inner;
            float *to = p->room + tile * size * p->inner;
            for (int64_t r = 0; r < size; r++) {
                const float *x = p->x + (tile * size + r) * p->x_stride;
                if (tile * size + r < p->rows)
                    for (int64_t i = begin; i < end; i++) to[i * size + r] = x[i];
                else
                    for (int64_t i = begin; i < end; i++) to[i * size + r] = 0.0f;
            }
        }
}

/* Rows that are read where they lie. */
ENTRY void NAME(few)(const struct product *p, int64_t first, int64_t last) {
    for (int64_t at = 0; at < p->inner; at += p->part) {
        int64_t panel = first;
        for (; panel + TWO <= last; panel += TWO) NAME(direct)(p, panel, at, 2);
        if (panel < last) NAME(direct)(p, panel, at, 1);
    }
}

/* Rows that were copied. */
ENTRY void NAME(many)(const struct product *p, int64_t first, int64_t last) {
    const int64_t size = tile_rows(p), together = GROUP_ROWS / size * size;
    for (int64_t row = 0; row < p->rows; row += together) {
        const int64_t end = row + together < p->rows ? row + together : p->rows;
        const int64_t tiles = (end - row + size - 1) / size, every = tiles > TWO ? tiles / TWO : 1;
        for (int64_t at = 0; at < p->inner; at += p->part)
            for (int64_t panel = first; panel < last; panel += TWO)
                for (int64_t r = row; r < end; r += size) {
                    const float *x = p->room + r * p->inner + at * size;
                    const int64_t passed = (r - row) / size * p->part / every, next = panel + TWO < last ? panel + TWO : panel;
                    const char *ahead = (const char *)(p->weight + ((next + passed / p->part) * p->inner + at + passed % p->part) * PANEL);
                    if (panel + TWO <= last) NAME(copied)(p, r, panel, at, x, ahead, every, size, 2);
                    else NAME(copied)(p, r, panel, at, x, ahead, every, size, 1);
                }
    }
}
#undef SIZES
#undef SIZES_UP_TO_6
