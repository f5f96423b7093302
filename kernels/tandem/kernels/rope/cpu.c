/* Rotary positions on the CPU, in place. Checks nothing: the caller has. Thread-safe; a parallel region only for many
   rows. */

#include "../instructions.h"
#include "../parallel.h"
#include "rope_args.h"

#include <stdint.h>

#define CODE "rope/rows.h"
#include "../both_isas.h"

typedef void rows_fn(const struct rope_args *, int64_t first, int64_t last);
static rows_fn *turn_rows;

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_instructions(name, AVX512);
#if defined(__x86_64__)
    if (chosen == AVX512) turn_rows = turn_rows_avx512;
    if (chosen == AVX2) turn_rows = turn_rows_avx2;
#endif
    return chosen;
}

static void share_out(void *data) {
    const struct rope_args *t = data;
    const int64_t count = threads(t->threads), which = thread(t->threads);
    turn_rows(t, t->rows * which / count, t->rows * (which + 1) / count);
}

/* Numbers that a thread should have at least. */
#define MIN_WORK 32768

/* `given` is a `struct rope_args`; nothing else is looked at. */
int tandem_rope(const struct rope_args *given, float unused) {
    struct rope_args t = *given;
    (void)unused;
    t.threads = threads_for(t.threads, t.rows * t.heads * t.width, MIN_WORK);
    run_region(share_out, &t, t.threads);
    return 0;
}
