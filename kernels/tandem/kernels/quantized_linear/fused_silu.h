/* silu(gate) · up of a product with the columns of gate, then those of up: strip by strip, so that intermediate numbers
   stay in a core's cache. The same numbers as of the parts one after the other. */

#pragma once

#include "../silu_mul/silu_args.h"
#include "product.h"

#define STRIP COLUMNS  /* a block of the weight has as many */
#define GATED_ROWS 120 /* at a time; whole tiles */

typedef void gate_fn(const struct gates *, int64_t first, int64_t last);
static gate_fn *gate_rows;

/* The strip from `column` on, as columns [to, to + STRIP) of `both`. */
static struct quantized strip_of(const struct quantized *p, int64_t column, int64_t to, int64_t which) {
    const int64_t from = column - to;
    struct quantized part = *p;
    if (p->blocks) part = unpacked(p, column, which, to / STRIP);
    else part.weight += from / STRIP * p->block_bytes;
    part.scales += from;
    if (p->sums) part.sums += from;
    if (p->bias) part.bias += from * (int64_t)sizeof(float);
    part.columns = 2 * STRIP;
    return part;
}

static void strip_product(struct quantized part, int64_t row, int64_t rows, int64_t to, char *both) {
    part.rows = rows, part.out = both;
    part.numbers += row * part.planes * part.stride, part.row_scales += row;
    if (part.bits == 4) part.group_sums += row * part.planes * (part.stride / GROUP);
    multiply_columns(&part, to, to + STRIP);
}

/* The strips that one of `count` threads computes; rows are quantised already, p->out is [rows][columns / 2]. */
static void gated_share(const struct quantized *p, int64_t which, int64_t count) {
    const int64_t width = p->columns / 2, strips = width / STRIP, size = p->is_bf16 ? 2 : 4;
    char both[GATED_ROWS * 2 * STRIP * 4] __attribute__((aligned(64)));
    for (int64_t column = strips * which / count * STRIP; column < strips * (which + 1) / count * STRIP; column += STRIP) {
        const struct quantized gate = strip_of(p, column, 0, which), up = strip_of(p, width + column, STRIP, which);
        for (int64_t row = 0; row < p->rows; row += GATED_ROWS) {
            const int64_t rows = p->rows - row < GATED_ROWS ? p->rows - row : GATED_ROWS;
            strip_product(gate, row, rows, 0, both);
            strip_product(up, row, rows, STRIP, both);
            const struct gates gates = {
                .x = both, .out = p->out + (row * width + column) * size, .rows = rows, .width = STRIP, .out_stride = width,
                .is_bf16 = p->is_bf16};
            gate_rows(&gates, 0, rows);
        }
    }
}
