/* Scores of forbidden tokens on the CPU. Checks nothing: the caller has. Thread-safe; a parallel region only for many rows. */

#include "../instructions.h"
#include "../parallel.h"
#include "mask_args.h"

#include <stdint.h>

#define CODE "token_mask/rows.h"
#include "../both_isas.h"

typedef void rows_fn(const struct masks *, int64_t first, int64_t last);
static rows_fn *forbid_rows;

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_instructions(name, AVX512);
#if defined(__x86_64__)
    if (chosen == AVX512) forbid_rows = forbid_rows_avx512;
    if (chosen == AVX2) forbid_rows = forbid_rows_avx2;
#endif
    return chosen;
}

static void share_out(void *data) {
    const struct masks *m = data;
    const int64_t count = threads(m->threads), which = thread(m->threads);
    forbid_rows(m, m->count * which / count, m->count * (which + 1) / count);
}

/* Scores that a thread should have at least. */
#define MIN_WORK 262144

/* `given` is a `struct masks`; nothing else is looked at. */
int tandem_token_mask(const struct masks *given, float unused) {
    struct masks m = *given;
    (void)unused;
    m.threads = threads_for(m.threads, m.count * m.width, MIN_WORK);
    run_region(share_out, &m, m.threads);
    return 0;
}
