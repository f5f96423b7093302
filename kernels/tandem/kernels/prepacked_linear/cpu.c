/* x · weightᵀ on the CPU, in bfloat16: for few rows, whose weights are read once, at the speed of memory; with AVX2 for any
   number of rows.

   Weights lie as oneDNN packs them for its own products, so that one copy serves both; with AVX2, for which oneDNN packs
   none, in the same way:

       [columns / block][inner / 2][block][2]        columns: of the result; inner: the summed dimension

   Two neighbours of a row of x are multiplied with 16 columns in one instruction (AVX512-BF16), or in two of AVX-512; with
   AMX two and more rows are multiplied with tiles of the weights; for AVX2 see columns_avx2.h. Sums are float32, the result is rounded once. Checks
   nothing: the caller has. One parallel region a call; thread-safe. */

#include "../parallel.h"
#include "amx.h"
#include "product.h"

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. The answer is 1 for
   AVX-512, 2 with AMX, 3 for AVX2. */
int tandem_choose_path(const char *name) {
    const int is_amx = !strcmp(name, "amx");
    tiled_columns = (is_amx || !*name) && may_use_amx() ? columns_amx : NULL;
    if (is_amx && !tiled_columns) return 0;
    const int chosen = choose_product(is_amx ? "" : name);
    return chosen == AVX2 ? 3 : chosen ? 1 + !!tiled_columns : 0;
}

static void share_out(void *data) {
    const struct product *p = data;
    const int64_t which = thread(p->threads), count = threads(p->threads), vectors = p->columns / 16;
#if defined(__x86_64__)
    if (p->wide) {
        const int64_t tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS;
        widen_tiles_avx2(p, tiles * which / count, tiles * (which + 1) / count);
        barrier(count);
        wide_columns_avx2(p, vectors * which / count * 16, vectors * (which + 1) / count * 16);
        return;
    }
#endif
    product_share(p, which, count);
}

/* Products of numbers that a thread should have at least. */
#define MIN_WORK 65536

/* `given` is a `struct product`; nothing else is looked at. */
int tandem_prepacked_linear(const struct product *given, float unused) {
    struct product p = *given;
    (void)unused;
    p.threads = threads_for(p.threads, p.rows * p.columns * p.inner, MIN_WORK);
    run_region(share_out, &p, p.threads);
    return 0;
}
