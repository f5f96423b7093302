/* What a dense decoder layer does to few rows before and behind its attention, each in one parallel region: a row alone takes
   a layer some hundred microseconds, of which a dozen calls would be a third.

       before   norm ▸ qkv ▸ rotate                                    threads meet at the end
       behind   o ▸ add, norm ▸ gate, up ▸ silu · up ▸ down ▸ add      they meet behind o, behind gate and up, at the end

   What is short is done by every thread for itself, so that none waits. Checks nothing: the caller has. */

#include "../instructions.h"
#include "../packed_linear/product.h"
#include "../region.h"
#include "../rms_norm/norm.h"
#include "../rotate/turn.h"
#include "../silu_mul/gates.h"

#include <math.h>

#if defined(__x86_64__)
#define ISA 512
#include "../vectors.h"
#include "../rms_norm/rows.h"
#include "../rotate/rows.h"
#include "../silu_mul/rows.h"
#undef ISA
#endif

/* Fields that the code fills in itself: x and out of the norm, x of qkv, gate_up and down, all of gates but its width. */
struct before { struct norm norm; struct product qkv; struct turn turn; int64_t threads; };
struct behind {
    struct product o;
    struct norm norm;
    struct product gate_up;
    struct gates gates;
    struct product down;
    int64_t threads;
};

struct call { const struct before *before; const struct behind *behind; float eps; int64_t threads; };

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) { return choose_product(name); }

#if defined(__x86_64__)

static void run_before(void *data) {
    const struct call *c = data;
    const struct norm *given = &c->before->norm;
    uint16_t normed[given->rows * given->width] __attribute__((aligned(64)));
    struct norm norm = *given;
    struct product qkv = c->before->qkv;
    norm.out = (char *)normed, qkv.x = normed;
    norm_rows_avx512(&norm, c->eps, 0, norm.rows);
    product_share(&qkv, thread(c->threads), threads(c->threads));
}

static void run_behind(void *data) {
    const struct call *c = data;
    const struct behind *b = c->behind;
    const int64_t which = thread(c->threads), count = threads(c->threads), numbers = b->norm.rows * b->norm.width;
    uint16_t x[numbers] __attribute__((aligned(64))), normed[numbers] __attribute__((aligned(64)));
    uint16_t gated[b->norm.rows * b->gates.width] __attribute__((aligned(64)));
    struct norm norm = b->norm;
    struct product gate_up = b->gate_up, down = b->down;
    struct gates gates = b->gates;
    product_share(&b->o, which, count);
    memcpy(x, norm.x, sizeof x);
    meet(count);
    norm.x = (char *)x, norm.added = (const char *)b->o.out, norm.out = (char *)normed;
    norm_rows_avx512(&norm, c->eps, 0, norm.rows);
    gate_up.x = normed;
    product_share(&gate_up, which, count);
    meet(count);
    gates.x = (const char *)gate_up.out, gates.out = (char *)gated, gates.rows = norm.rows, gates.is_bf16 = 1;
    gate_rows_avx512(&gates, 0, gates.rows);
    down.x = gated;
    product_share(&down, which, count);
}

/* x + first, rounded, + second, rounded. */
ENTRY void add_two(char *x, const void *first, const void *second, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += 16) {
        const __m512 sum = as_bf16_avx512(add_avx512(load_avx512(x, i, 1), load_avx512(first, i, 1)));
        store_avx512(x, i, 1, add_avx512(sum, load_avx512(second, i, 1)));
    }
}

/* `given`: 0 and a `struct before`, or 1 and a `struct behind`. */
int tandem_dense_row(const int64_t *given, float eps) {
    struct call c = {.eps = eps};
    if (*given == 0) {
        c.before = (const void *)(given + 1);
        c.threads = c.before->threads;
        run_region(run_before, &c, c.threads);
        turn_rows_avx512(&c.before->turn, 0, c.before->turn.rows);
        return 0;
    }
    c.behind = (const void *)(given + 1);
    c.threads = c.behind->threads;
    run_region(run_behind, &c, c.threads);
    add_two(c.behind->norm.x, c.behind->o.out, c.behind->down.out, c.behind->norm.rows * c.behind->norm.width);
    return 0;
}

#else

int tandem_dense_row(const int64_t *given, float eps) { return (void)given, (void)eps, 1; }

#endif
