/* Fused halves of a dense decoder layer, before and behind its attention, for few rows; each is one parallel region. A layer
   takes some hundred microseconds for a single row, of which a dozen calls would be a third.

       before   norm ▸ qkv ▸ rotate                                    barrier at the end
       behind   o ▸ add, norm ▸ gate, up ▸ silu · up ▸ down ▸ add      barriers behind o, behind gate and up, at the end
       step     both and the attention between, of all layers          see step.h, also for several rows
       chunks   the same of any number of rows, those of prompts, too   see chunks.h

   Every thread computes short parts for itself, so that none waits; of several rows each takes some, with a barrier
   between all parts. Any number of rows is multiplied with quantised weights so. Checks nothing: the caller has. */

#include "../instructions.h"
#include "../prepacked_linear/amx.h"
#include "../paged_decode/decode.h"
#include "../paged_decode/work_split.h"
#include "../quantized_linear/product.h"
#include "../extend_attention/extend_args.h"
#include "../parallel.h"
#include "../rms_norm/norm_args.h"
#include "../rope/rope_args.h"
#include "../silu_mul/silu_args.h"

#include <math.h>

#define CODE "fused_layer/parts.h"
#include "../both_isas.h"
#include "../quantized_linear/fused_silu.h"

typedef void norm_fn(const struct norm *, float eps, int64_t first, int64_t last);
typedef void turn_fn(const struct rope_args *, int64_t first, int64_t last);
typedef void add_two_fn(char *x, const void *first, const void *second, int64_t numbers);
typedef void add_row_fn(uint16_t *out, const uint16_t *x, const char *added, int64_t numbers);
static norm_fn *norm_rows;
static turn_fn *turn_rows;
static add_two_fn *add_two;
static add_row_fn *add_row;

/* A product with a plain weight (kind 0) or a quantised one (1). */
struct linear { int64_t kind; union { struct product plain; struct quantized quantized; }; };
_Static_assert(sizeof(struct linear) == 23 * 8, "_PRODUCT_FIELDS in row.py");

/* Fields that the code fills in itself: x and out of the norm, x of all products, room for quantised rows, all of gates but its
   width. */
struct pre_attention { struct norm norm; struct linear qkv; struct rope_args turn; int64_t threads; };
struct post_attention {
    const uint16_t *mixed;
    int64_t mixed_width;
    struct linear o;
    struct norm norm;
    struct linear gate_up;
    struct gates gates;
    struct linear down;
    int64_t threads;
};

struct call { const struct pre_attention *pre_attention; const struct post_attention *post_attention; float eps; int64_t threads; };

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_product(name);
#if defined(__x86_64__)
    if (chosen == AVX2) {
        quantize_rows = quantize_rows_avx2, quantized_columns = quantized_columns_signs, quantized_lanes = 8;
        quantized_tiles = NULL, tiled_columns = NULL, unpack_block = NULL;
        attend = attend_avx2, finish = finish_avx2, gate_rows = gate_rows_avx2;
        norm_rows = norm_rows_avx2, turn_rows = turn_rows_avx2, add_two = add_two_avx2, add_row = add_row_avx2;
    } else {
        quantize_rows = quantize_rows_avx512, quantized_columns = quantized_columns_vnni, quantized_lanes = 16;
        const int is_tiled = chosen && !*name && may_use_amx();
        quantized_tiles = is_tiled ? quantized_columns_amx : NULL, tiled_columns = is_tiled ? columns_amx : NULL;
        unpack_block = unpack_block_avx512;
        attend = attend_avx512, finish = finish_avx512, gate_rows = gate_rows_avx512;
        norm_rows = norm_rows_avx512, turn_rows = turn_rows_avx512, add_two = add_two_avx512, add_row = add_row_avx512;
    }
#endif
    return chosen;
}

/* True if AVX2 widens so many rows for each product. */
static int is_widened(const struct quantized *p) { return quantized_lanes == 8 && p->rows >= MANY_ROWS(p->bits, p->planes); }

/* As `quantized_share` on AVX2, with rows and weights widened to 16 bits; every thread widens the rows for itself. */
static void widened_share(const struct quantized *p, int64_t which, int64_t count) {
#if defined(__x86_64__)
    const int64_t tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS, vectors = (p->columns + 7) / 8;
    int32_t wide[tiles * TILE_ROWS * (p->stride / 2)] __attribute__((aligned(64)));
    int32_t panel[PANEL_COLUMNS / 2 * p->stride] __attribute__((aligned(64)));
    const struct many m = {.product = *p, .wide = wide};
    widen_tiles_signs(&m, 0, tiles);
    many_columns_signs(&m, panel, vectors * which / count * 8, vectors * (which + 1) / count * 8);
#endif
}

/* This thread's share of a product with few rows, the first at x; every thread quantises them for itself. `blocks`: as in
   `struct quantized`. */
static void rows_share(const struct linear *given, const uint16_t *x, char *out, int64_t rows, int64_t x_stride, char *blocks,
                       int64_t which, int64_t count) {
    if (given->kind == 0) {
        struct product p = given->plain;
        p.x = x, p.out = (uint16_t *)out, p.rows = rows, p.x_stride = x_stride;
        product_share(&p, which, count);
        return;
    }
    struct quantized p = given->quantized;
    if (p.bits == 4 && blocks && rows * p.planes > FEW_ROWS) {
        p.blocks = blocks;
        p.stride = (p.inner + TILE_NUMBERS - 1) / TILE_NUMBERS * TILE_NUMBERS;
    }
    uint8_t numbers[rows * p.planes * p.stride] __attribute__((aligned(64)));
    int32_t sums[rows * p.planes * p.stride / GROUP];
    float scales[rows];
    p.x = (const char *)x, p.out = out, p.rows = rows, p.x_stride = x_stride;
    p.numbers = numbers, p.group_sums = sums, p.row_scales = scales;
    quantize_rows(&p, 0, rows);
    if (is_widened(&p)) widened_share(&p, which, count);
    else quantized_share(&p, which, count);
}

static char *linear_out(const struct linear *given) {
    return given->kind == 0 ? (char *)given->plain.out : given->quantized.out;
}

static void linear_share(const struct linear *given, const uint16_t *x, int64_t which, int64_t count) {
    rows_share(given, x, linear_out(given), 1, 0, NULL, which, count);
}

static void run_before(void *data) {
    const struct call *c = data;
    const struct norm *given = &c->pre_attention->norm;
    uint16_t normed[given->rows * given->width] __attribute__((aligned(64)));
    struct norm norm = *given;
    norm.out = (char *)normed;
    norm_rows(&norm, c->eps, 0, norm.rows);
    linear_share(&c->pre_attention->qkv, normed, thread(c->threads), threads(c->threads));
}

static void run_behind(void *data) {
    const struct call *c = data;
    const struct post_attention *b = c->post_attention;
    const int64_t which = thread(c->threads), count = threads(c->threads), numbers = b->norm.rows * b->norm.width;
    uint16_t x[numbers] __attribute__((aligned(64))), normed[numbers] __attribute__((aligned(64)));
    uint16_t gated[b->norm.rows * b->gates.width] __attribute__((aligned(64)));
    struct norm norm = b->norm;
    struct gates gates = b->gates;
    linear_share(&b->o, b->mixed, which, count);
    memcpy(x, norm.x, sizeof x);
    barrier(count);
    norm.x = (char *)x, norm.added = linear_out(&b->o), norm.out = (char *)normed;
    norm_rows(&norm, c->eps, 0, norm.rows);
    linear_share(&b->gate_up, normed, which, count);
    barrier(count);
    gates.x = linear_out(&b->gate_up), gates.out = (char *)gated, gates.rows = norm.rows, gates.is_bf16 = 1;
    gate_rows(&gates, 0, gates.rows);
    linear_share(&b->down, gated, which, count);
}

#include "step.h"

/* Of several rows a thread takes its own where nothing is summed over columns; the room between two parts is shared. */
static void run_rows_before(void *data) {
    const struct call *c = data;
    const struct norm *norm = &c->pre_attention->norm;
    const int64_t which = thread(c->threads), count = threads(c->threads);
    const int64_t first = norm->rows * which / count, last = norm->rows * (which + 1) / count;
    norm_rows(norm, c->eps, first, last);
    barrier(count);
    const struct linear *qkv = &c->pre_attention->qkv;
    rows_share(qkv, (const uint16_t *)norm->out, linear_out(qkv), norm->rows, norm->width, NULL, which, count);
    barrier(count);
    turn_rows(&c->pre_attention->turn, first, last);
}

static void run_rows_behind(void *data) {
    const struct call *c = data;
    const struct post_attention *b = c->post_attention;
    const int64_t which = thread(c->threads), count = threads(c->threads), rows = b->norm.rows, width = b->norm.width;
    const int64_t first = rows * which / count, last = rows * (which + 1) / count, inner = b->gates.width;
    struct norm norm = b->norm;
    rows_share(&b->o, b->mixed, linear_out(&b->o), rows, b->mixed_width, NULL, which, count);
    barrier(count);
    norm.added = linear_out(&b->o), norm.out = linear_out(&b->o); /* a row is added before it is written over */
    norm_rows(&norm, c->eps, first, last);
    barrier(count);
    rows_share(&b->gate_up, (const uint16_t *)norm.out, linear_out(&b->gate_up), rows, width, NULL, which, count);
    barrier(count);
    struct gates gates = {.x = linear_out(&b->gate_up), .out = linear_out(&b->gate_up), .rows = rows, .width = inner,
                          .out_stride = 2 * inner, .is_bf16 = 1};
    gate_rows(&gates, first, last);
    barrier(count);
    rows_share(&b->down, (const uint16_t *)gates.out, linear_out(&b->down), rows, 2 * inner, NULL, which, count);
    barrier(count);
    uint16_t *x = (uint16_t *)norm.x + first * width;
    add_row(x, x, linear_out(&b->down) + first * width * 2, (last - first) * width);
}

/* Memory for any number of rows: their `numbers` and what stands behind those, see `struct quantized`, and unpacked `blocks` of
   weights, or on AVX2 widened rows and panels. */
struct room { uint8_t *numbers; char *blocks; };

/* As `rows_share` of any number of rows, the next at `x_stride`: threads quantise their own rows into the numbers of `room`,
   and meet. */
static void many_rows_share(const struct linear *given, const uint16_t *x, char *out, int64_t rows, int64_t x_stride,
                            const struct room *room, int is_gated, int64_t which, int64_t count) {
    struct quantized p = given->quantized;
    p.x = (const char *)x, p.out = out, p.rows = rows, p.x_stride = x_stride;
    p.numbers = room->numbers, p.row_scales = (float *)(room->numbers + rows * p.planes * p.stride);
    p.group_sums = (int32_t *)(p.row_scales + rows);
    p.blocks = p.bits == 4 && unpack_block ? room->blocks : NULL;
    quantize_rows(&p, rows * which / count, rows * (which + 1) / count);
    barrier(count);
    if (is_widened(&p)) {
#if defined(__x86_64__)
        int32_t *wide = (int32_t *)room->blocks;
        const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        const struct many m = {.product = p, .wide = wide, .panels = wide + tiles * TILE_ROWS * (p.stride / 2)};
        many_share_signs(&m, which, count);
#endif
    } else if (is_gated) gated_share(&p, which, count);
    else quantized_share(&p, which, count);
    barrier(count);
}

static void run_many_before(void *data) {
    const struct call *c = data;
    const struct norm *norm = &c->pre_attention->norm;
    const struct linear *qkv = &c->pre_attention->qkv;
    const int64_t which = thread(c->threads), count = threads(c->threads), rows = norm->rows;
    const int64_t first = rows * which / count, last = rows * (which + 1) / count;
    const struct room room = {qkv->quantized.numbers, qkv->quantized.blocks};
    norm_rows(norm, c->eps, first, last);
    many_rows_share(qkv, (const uint16_t *)norm->out, linear_out(qkv), rows, norm->width, &room, 0, which, count);
    turn_rows(&c->pre_attention->turn, first, last);
}

/* The layer behind its attention, except for what `down` adds to x at last: that is left in `added`. */
static void many_behind_share(const struct post_attention *b, char *x, const uint16_t *mixed, char *added, char *gated, int64_t rows,
                              const struct room *room, float eps, int64_t which, int64_t count) {
    const int64_t width = b->norm.width, first = rows * which / count, last = rows * (which + 1) / count;
    struct norm norm = b->norm;
    struct quantized gate_up = b->gate_up.quantized;
    gate_up.rows = rows;
    struct gates gates = {.x = gated, .out = gated, .rows = rows, .width = b->gates.width, .out_stride = b->gates.width, .is_bf16 = 1};
    many_rows_share(&b->o, mixed, added, rows, b->mixed_width, room, 0, which, count);
    norm.x = x, norm.added = added, norm.out = added; /* a row is added before it is written over */
    norm_rows(&norm, eps, first, last);
    many_rows_share(&b->gate_up, (const uint16_t *)added, gated, rows, width, room, 1, which, count);
    if (is_widened(&gate_up)) gates.out_stride *= 2, gate_rows(&gates, first, last); /* of its own rows: none waits */
    many_rows_share(&b->down, (const uint16_t *)gated, added, rows, gates.out_stride, room, 0, which, count);
}

static void run_many_behind(void *data) {
    const struct call *c = data;
    const struct post_attention *b = c->post_attention;
    const int64_t which = thread(c->threads), count = threads(c->threads), rows = b->norm.rows, width = b->norm.width;
    const int64_t first = rows * which / count, last = rows * (which + 1) / count;
    const struct room room = {b->o.quantized.numbers, b->o.quantized.blocks};
    char *added = linear_out(&b->o);
    many_behind_share(b, (char *)b->norm.x, b->mixed, added, linear_out(&b->gate_up), rows, &room, c->eps, which, count);
    uint16_t *x = (uint16_t *)b->norm.x + first * width;
    add_row(x, x, added + first * width * 2, (last - first) * width);
}

#include "chunks.h"

/* `given` are the threads, the scale of attention as bits of a float, the fields of `struct step` up to those of `decode`
   that are the caller's, and a `struct layer` for each. Answers with an `enum answer`; slots are the caller's to check. */
static int run_layers(const int64_t *given, float eps) {
    struct step s;
    memset(&s, 0, sizeof s);
    const int64_t own = offsetof(struct step, decode) + offsetof(struct decode, scale);
    memcpy(&s, given + 2, own);
    s.layer = (const void *)(given + 2 + own / 8), s.eps = eps, s.threads = s.decode.threads = given[0];
    const int32_t scale_bits = (int32_t)given[1];
    memcpy(&s.decode.scale, &scale_bits, sizeof scale_bits);
    const enum answer answer = open_decode(&s.decode);
    if (answer != DONE) return answer;
    run_region(s.decode.batch == 1 ? run_step : run_rows_step, &s, s.threads);
    close_decode(&s.decode);
    return DONE;
}

/* The same with the fields of `struct chunks` that are the caller's before the layers. */
static int run_chunked(const int64_t *given, float eps) {
    struct chunks c;
    memset(&c, 0, sizeof c);
    const int64_t own = offsetof(struct step, decode) + offsetof(struct decode, scale);
    const int64_t own_chunks = offsetof(struct chunks, extend) + offsetof(struct extend, scale);
    memcpy(&c, given + 2 + own / 8, own_chunks);
    struct step *s = &c.step;
    memset(s, 0, sizeof *s);
    memcpy(s, given + 2, own);
    s->layer = (const struct layer *)(given + 2 + (own + own_chunks) / 8) + c.first_layer;
    s->eps = eps, s->threads = s->decode.threads = given[0];
    const int32_t scale_bits = (int32_t)given[1];
    memcpy(&s->decode.scale, &scale_bits, sizeof scale_bits);
    c.extend.scale = s->decode.scale;
    if (c.extend.sequences && c.check(&c.extend, s->decode.num_blocks, c.max_blocks, c.rows - s->decode.batch)) return OUTSIDE;
    const enum answer answer = open_decode(&s->decode);
    if (answer != DONE) return answer;
    run_region(run_chunks, &c, s->threads);
    close_decode(&s->decode);
    return DONE;
}

/* `given`: 0 and a `struct pre_attention`, 1 and a `struct post_attention`, or 2 and what `run_layers` takes; 3 and 4: as 0 and 1, of as many
   rows as the norm has, with all of its room, tables and strides given; 5 and 6: as 3 and 4, of any number of rows; 7 and what
   `run_chunked` takes. */
int tandem_fused_layer(const int64_t *given, float eps) {
    struct call c = {.eps = eps};
    if (*given == 2) return run_layers(given + 1, eps);
    if (*given == 7) return run_chunked(given + 1, eps);
    if (*given == 0 || *given == 3 || *given == 5) {
        c.pre_attention = (const void *)(given + 1);
        c.threads = c.pre_attention->threads;
        if (*given == 3) return run_region(run_rows_before, &c, c.threads), 0;
        if (*given == 5) return run_region(run_many_before, &c, c.threads), 0;
        run_region(run_before, &c, c.threads);
        turn_rows(&c.pre_attention->turn, 0, c.pre_attention->turn.rows);
        return 0;
    }
    c.post_attention = (const void *)(given + 1);
    c.threads = c.post_attention->threads;
    if (*given == 4) return run_region(run_rows_behind, &c, c.threads), 0;
    if (*given == 6) return run_region(run_many_behind, &c, c.threads), 0;
    run_region(run_behind, &c, c.threads);
    add_two(c.post_attention->norm.x, linear_out(&c.post_attention->o), linear_out(&c.post_attention->down), c.post_attention->norm.rows * c.post_attention->norm.width);
    return 0;
}
