/* x · weightᵀ on the CPU in bfloat16. The order of a row's sums depends on the weight's shape alone: not on the number of
   rows, on its place among them or on threads, which share the columns.

   Weights lie as in ../prepacked_linear. With AMX every row goes through the matrix unit, a single one, too: its order
   of addition differs from that of vector instructions. Sums are float32, the result is rounded once. Checks nothing:
   the caller has. One parallel region a call; thread-safe. */

#include "../instructions.h"
#include "../prepacked_linear/amx.h"
#include "../prepacked_linear/product.h"
#include "../parallel.h"

static int uses_amx;

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int is_amx = !strcmp(name, "amx");
    uses_amx = (is_amx || !*name) && may_use_amx();
    if (is_amx && !uses_amx) return 0;
    return choose_product(is_amx ? "" : name);
}

static void share_out(void *data) {
    const struct product *p = data;
    const int64_t which = thread(p->threads), count = threads(p->threads), vectors = p->columns / 16;
    if (uses_amx && p->inner % 32 == 0) columns_amx(p, vectors * which / count * 16, vectors * (which + 1) / count * 16);
    else product_share(p, which, count);
}

/* Products of numbers that a thread should have at least. */
#define MIN_WORK 65536

/* `given` is a `struct product`; nothing else is looked at. */
int tandem_deterministic_linear(const struct product *given, float unused) {
    struct product p = *given;
    (void)unused;
    p.threads = threads_for(p.threads, p.rows * p.columns * p.inner, MIN_WORK);
    run_region(share_out, &p, p.threads);
    return 0;
}
