/* RMSNorm of rows on the CPU, after a residual is added where there is one. Checks nothing: the caller has. Thread-safe; a
   parallel region only for many rows. */

#include "../instructions.h"
#include "../parallel.h"
#include "norm_args.h"

#include <math.h>
#include <stdint.h>

struct call { struct norm norm; float eps; int64_t threads; };

#define CODE "rms_norm/rows.h"
#include "../both_isas.h"

typedef void rows_fn(const struct norm *, float eps, int64_t first, int64_t last);
static rows_fn *norm_rows;

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_instructions(name, AVX512);
#if defined(__x86_64__)
    if (chosen == AVX512) norm_rows = norm_rows_avx512;
    if (chosen == AVX2) norm_rows = norm_rows_avx2;
#endif
    return chosen;
}

static void share_out(void *data) {
    const struct call *c = data;
    const int64_t count = threads(c->threads), which = thread(c->threads), rows = c->norm.rows;
    norm_rows(&c->norm, c->eps, rows * which / count, rows * (which + 1) / count);
}

/* Numbers that a thread should have at least. */
#define MIN_WORK 32768

/* `given` is a `struct norm`. */
int tandem_rms_norm(const struct norm *given, float eps) {
    struct call c = {*given, eps, given->threads};
    c.threads = threads_for(c.threads, c.norm.rows * c.norm.width, MIN_WORK);
    run_region(share_out, &c, c.threads);
    return 0;
}
