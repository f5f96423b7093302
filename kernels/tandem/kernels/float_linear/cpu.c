/* x · weightᵀ on the CPU in float32. The inner dimension is summed in parts of some hundred numbers, and those sums are
   added: one chain of all numbers rounds twice as much. The order of a row's sums does not depend on the number of rows,
   on its place among them or on threads, which share the columns.

   Weights lie in panels of 16 columns, of which the last is filled up:

       [columns / 16][inner][16]

   Checks nothing: the caller has. One parallel region a call; thread-safe. */

#include "../instructions.h"
#include "../parallel.h"

#include <stdint.h>
#include <string.h>

#define PANEL 16
#define DIRECT_ROWS 6 /* at most so many are read where they lie */
#define GROUP_ROWS 144 /* at most so many meet one panel after the other: a part of them stays in a core's cache */
#define COPIED 64      /* numbers of a row that are copied at a time */

struct product {
    const float *x, *weight, *bias; /* bias may be NULL */
    float *out;
    int64_t rows, inner, columns;
    int64_t x_stride; /* from row to row, in numbers; out is contiguous */
    int64_t part;     /* numbers of a sum; the last may have fewer */
    float *room;      /* for a copy of all rows, and one more of six; NULL for at most DIRECT_ROWS rows */
    int64_t threads;
};

typedef void share_fn(const struct product *, int64_t first, int64_t last);
static share_fn *few, *copy, *many;
static int64_t most_rows; /* of a tile */

/* Rows of each tile: as equal as can be. */
static int64_t tile_rows(const struct product *p) {
    const int64_t tiles = (p->rows + most_rows - 1) / most_rows;
    return (p->rows + tiles - 1) / tiles;
}

#define CODE "float_linear/tiles.h"
#include "../both_isas.h"

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_instructions(name, AVX512);
#if defined(__x86_64__)
    if (chosen == AVX512) few = few_avx512, copy = copy_avx512, many = many_avx512, most_rows = 12;
    if (chosen == AVX2) few = few_avx2, copy = copy_avx2, many = many_avx2, most_rows = 6;
#endif
    return chosen;
}

static void share_out(void *data) {
    const struct product *p = data;
    const int64_t which = thread(p->threads), count = threads(p->threads), panels = (p->columns + PANEL - 1) / PANEL;
    if (p->room) {
        const int64_t size = tile_rows(p), tiles = (p->rows + size - 1) / size;
        copy(p, tiles * which / count, tiles * (which + 1) / count);
        barrier(count);
    }
    (p->room ? many : few)(p, panels * which / count, panels * (which + 1) / count);
}

/* Products of numbers that a thread should have at least. */
#define MIN_WORK 65536

/* `given` is a `struct product`; nothing else is looked at. */
int tandem_float_linear(const struct product *given, float unused) {
    struct product p = *given;
    (void)unused;
    p.threads = threads_for(p.threads, p.rows * p.columns * p.inner, MIN_WORK);
    run_region(share_out, &p, p.threads);
    return 0;
}
