/* x · weightᵀ for few rows on CPUs below AVX-512, in bfloat16: a weight is read once as it is and widened to float32 in
   registers. Sums are float32, the result is rounded once. Checks nothing: the caller has. One parallel region a call;
   thread-safe. */

#include "../instructions.h"
#include "../parallel.h"

#include <stdint.h>

struct product {
    const uint16_t *x, *weight, *bias; /* bias may be NULL; weight [columns, inner], contiguous */
    uint16_t *out;                     /* [rows, columns], contiguous */
    int64_t rows, inner, columns;
    int64_t x_stride; /* from row to row, in numbers */
    int64_t threads;
};

#if defined(__x86_64__)
#define ISA 256
#include "../vectors.h"

FN float widened(uint16_t number) {
    const uint32_t bits = (uint32_t)number << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* ROWS rows meet COLUMNS columns, at most four: so many sums stay in registers while the inner numbers go by. */
FN void tile(const struct product *p, int64_t row, int64_t column, const int ROWS, const int COLUMNS) {
    const uint16_t *x = p->x + row * p->x_stride, *weight = p->weight + column * p->inner;
    const int64_t whole = p->inner / LANES * LANES;
    VEC sum[4][4];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 4; c++) sum[r][c] = NAME(zero)();
    for (int64_t i = 0; i < whole; i += LANES) {
        VEC here[4];
        for (int c = 0; c < COLUMNS; c++) here[c] = NAME(load_bf16)(weight + c * p->inner + i);
        for (int r = 0; r < ROWS; r++) {
            const VEC row_here = NAME(load_bf16)(x + r * p->x_stride + i);
            for (int c = 0; c < COLUMNS; c++) sum[r][c] = NAME(fma)(row_here, here[c], sum[r][c]);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        float sums[LANES] = {0}, rest[4] = {0};
        _mm_storeu_ps(sums, NAME(sums)(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
        for (int64_t i = whole; i < p->inner; i++)
            for (int c = 0; c < COLUMNS; c++) rest[c] += widened(x[r * p->x_stride + i]) * widened(weight[c * p->inner + i]);
        for (int c = 0; c < COLUMNS; c++) sums[c] += rest[c] + (p->bias ? widened(p->bias[column + c]) : 0);
        uint16_t out[LANES];
        NAME(store_bf16)(out, NAME(load_f32)(sums));
        memcpy(p->out + (row + r) * p->columns + column, out, COLUMNS * sizeof *out);
    }
}

FN void rows(const struct product *p, int64_t column, const int COLUMNS) {
    int64_t row = 0;
    for (; row + 2 <= p->rows; row += 2) tile(p, row, column, 2, COLUMNS);
    if (row < p->rows) tile(p, row, column, 1, COLUMNS);
}

ENTRY void columns(const struct product *p, int64_t first, int64_t last) {
    for (; first + 4 <= last; first += 4) rows(p, first, 4);
    for (; first < last; first++) rows(p, first, 1);
}
#else
static void columns(const struct product *p, int64_t first, int64_t last) { (void)p, (void)first, (void)last; }
#endif

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) { return choose_instructions(name, AVX2); }

static void share_out(void *data) {
    const struct product *p = data;
    const int64_t which = thread(p->threads), count = threads(p->threads);
    columns(p, p->columns * which / count, p->columns * (which + 1) / count);
}

/* Products of numbers that a thread should have at least. */
#define MIN_WORK 65536

/* `given` is a `struct product`; nothing else is looked at. */
int tandem_widened_linear(const struct product *given, float unused) {
    struct product p = *given;
    (void)unused;
    p.threads = threads_for(p.threads, p.rows * p.columns * p.inner, MIN_WORK);
    run_region(share_out, &p, p.threads);
    return 0;
}
