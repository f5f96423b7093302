/* silu(gate) · up of rows on the CPU. Checks nothing: the caller has. Thread-safe; a parallel region only for many rows. */

#include "../instructions.h"
#include "../parallel.h"
#include "silu_args.h"

#include <stdint.h>

#define CODE "silu_mul/rows.h"
#include "../both_isas.h"

typedef void rows_fn(const struct gates *, int64_t first, int64_t last);
static rows_fn *gate_rows;

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_instructions(name, AVX512);
#if defined(__x86_64__)
    if (chosen == AVX512) gate_rows = gate_rows_avx512;
    if (chosen == AVX2) gate_rows = gate_rows_avx2;
#endif
    return chosen;
}

static void share_out(void *data) {
    const struct gates *g = data;
    const int64_t count = threads(g->threads), which = thread(g->threads);
    gate_rows(g, g->rows * which / count, g->rows * (which + 1) / count);
}

/* Numbers that a thread should have at least. */
#define MIN_WORK 16384

/* `given` is a `struct gates`; nothing else is looked at. */
int tandem_silu_mul(const struct gates *given, float unused) {
    struct gates g = *given;
    (void)unused;
    g.threads = threads_for(g.threads, g.rows * g.width, MIN_WORK);
    run_region(share_out, &g, g.threads);
    return 0;
}
