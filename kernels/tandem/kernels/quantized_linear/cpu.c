/* x · weightᵀ with rows of 8 or 16 bits and a weight of 8 or 4.

       row      number · scale of the row, which its largest number gives       numbers from -127 to 127
       8 bits   number · scale of the column                                    from -127 to 127
       4 bits   (number · scale of 32 + offset of 32) · scale of the column     from -8 to 7, the scale from 1 to 15, and the
                                                                                offset so that it is a number of 8 bits again

   A weight of 8 bits may have a second number for some inner numbers, its outliers: OUTLIER_STEP times what the first one
   leaves. They stand behind all others, and meet the row's numbers there over OUTLIER_STEP.

   So both kinds are the same sum of products of whole numbers, which is exact in any order and on any unit.
   Numbers of 8 bits lie in blocks of 64 columns, [inner / 4][64][4], as VNNI and tiles read them, with a tile more of
   memory behind the last; those of 4 bits as in columns.h, each block one stream of bytes. Checks nothing: the caller has. One parallel region a call; thread-safe. */

#include "../instructions.h"
#include "../parallel.h"
#include "fused_silu.h"
#include "product.h"

#define LEAST_WEIGHT 1e-30f /* columns of smaller numbers are zeros */
#define MOST_NUMBER 127.0f
#define TOP_NUMBER 120.0f /* of a column's largest, before it is rounded */
#define LEAST_SHARE_OF_STEP 0.75f /* scales that are tried, as shares of the one with which a group's numbers span all q */
#define MOST_SHARE_OF_STEP 1.05f
#define TOGETHER 8 /* columns that are quantised side by side */

struct weight {
    const char *weight; /* [columns][inner] in float32 or bfloat16 */
    char *numbers;      /* [columns][inner] of 8 bits, or packed numbers of 4 */
    float *scales;
    int32_t *sums; /* of 4 bits: minus the sums of columns */
    const float *importance; /* of 4 bits: [inner], of errors in columns; NULL = all alike */
    /* Of 4 bits: how a number's error changes the targets behind it, [padded][padded], which is
       inner up to whole groups; NULL = not. */
    const float *feedback;
    float *room; /* of 4 bits: [threads][TOGETHER][padded] */
    int64_t columns, inner, is_bf16, block_bytes, threads;
};

#if defined(__x86_64__)
#define ISA 512
#include "../vectors.h"
#include "rows.h"
#include "columns.h"
#include "amx.h"
#include "unpack.h"
#include "weights.h"
#include "../silu_mul/rows.h"
#undef ISA
#define ISA 256
#include "../vectors.h"
#include "rows.h"
#include "columns.h"
#include "many_rows.h"
#include "weights.h"
#include "../silu_mul/rows.h"
#undef ISA
#endif

typedef void weight_fn(const struct weight *, int64_t first, int64_t last, float *room);
static weight_fn *to_bytes, *to_nibbles;

enum work { PRODUCT, GATED, MANY, BYTES, NIBBLES };
enum path { NO_PATH, VNNI_PATH, AVX2_PATH, AMX_PATH };
struct call { int64_t work; const struct quantized *product; const struct weight *weight; int64_t threads; };

/* For tests and at the start: the instructions by name, "" = the best; their path, NO_PATH if this CPU has not got them.
   Without VNNI, AVX-512 gains nothing here. */
int tandem_choose_path(const char *name) {
    quantized_columns = quantized_tiles = NULL;
#if defined(__x86_64__)
    const int has = choose_instructions("", AVX512);
    const int has_vnni = has == AVX512 && may_use(LEVEL_AVX512VNNI) && __builtin_cpu_supports("avx512vnni");
    const int is_tiled = has_vnni && (!*name || !strcmp(name, "amx")) && may_use_amx();
    if (is_tiled || (has_vnni && (!*name || !strcmp(name, "avx512vnni")))) {
        quantize_rows = quantize_rows_avx512, quantized_columns = quantized_columns_vnni, quantized_lanes = 16;
        to_bytes = to_bytes_avx512, to_nibbles = to_nibbles_avx512, unpack_block = unpack_block_avx512;
        gate_rows = gate_rows_avx512;
        quantized_tiles = is_tiled ? quantized_columns_amx : NULL;
        return is_tiled ? AMX_PATH : VNNI_PATH;
    }
    if (has && (!*name || !strcmp(name, "avx2"))) {
        quantize_rows = quantize_rows_avx2, quantized_columns = quantized_columns_signs, quantized_lanes = 8;
        to_bytes = to_bytes_avx2, to_nibbles = to_nibbles_avx2, unpack_block = NULL;
        gate_rows = gate_rows_avx2;
        return AVX2_PATH;
    }
#endif
    return NO_PATH;
}

static void share_out(void *data) {
    const struct call *c = data;
    const int64_t which = thread(c->threads), count = threads(c->threads);
    if (c->work >= BYTES) {
        const struct weight *w = c->weight;
        weight_fn *run = c->work == BYTES ? to_bytes : to_nibbles;
        const int64_t padded = (w->inner + GROUP - 1) / GROUP * GROUP;
        float *room = w->room ? w->room + which * TOGETHER * padded : NULL;
        run(w, w->columns * which / count, w->columns * (which + 1) / count, room);
        return;
    }
    const struct quantized *p = c->product;
    const int64_t first = p->rows * which / count, last = p->rows * (which + 1) / count;
    quantize_rows(p, first, last);
    barrier(count);
#if defined(__x86_64__)
    if (c->work == MANY) many_share_signs((const struct many *)p, which, count);
    else
#endif
    if (c->work == GATED) gated_share(p, which, count);
    else quantized_share(p, which, count);
}

/* Numbers that a thread should have at least: a region costs microseconds. */
#define MIN_WORK 65536

/* `given`: what to do, and a `struct quantized`; for BYTES and NIBBLES a `struct weight`, for MANY a `struct many`. */
int tandem_quantized_linear(const int64_t *given, float unused) {
    struct call c = {.work = given[0], .product = (const void *)(given + 1), .weight = (const void *)(given + 1)};
    (void)unused;
    const int is_weight = c.work >= BYTES;
    c.threads = is_weight ? c.weight->threads : c.product->threads;
    const struct quantized *p = c.product;
    const int64_t numbers = is_weight ? c.weight->columns * c.weight->inner : p->inner * p->columns;
    c.threads = threads_for(c.threads, numbers, MIN_WORK);
    run_region(share_out, &c, c.threads);
    return 0;
}
