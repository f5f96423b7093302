/* silu(gate) · up of a product with the columns of gate, then those of up: strip by strip, so that intermediate numbers
   stay in a core's cache. The same numbers as of the parts one after the other. */

#pragma once

#include "../silu_mul/silu_args.h"
#include "product.h"

#define STRIP COLUMNS  /* a block of the weight has as many */
#define GATED_ROWS 120 /* at a time; whole tiles */

typedef void gate_fn(const struct gates *, int64_t first, int64_t last);
static gate_fn *gate_rows;

/* Into columns [to, to + STRIP) of `part` goes the product with those from `column` on of `p`. */
static void strip_product(struct quantized *part, const struct quantized *p, int64_t column, int64_t to) {
    const int64_t from = column - to;
    part->weight = p->weight + from / STRIP * p->block_bytes;
    part->scales = p->scales + from;
    part->sums = p->sums ? p->sums + from : NULL;
    part->bias = p->bias ? p->bias + from * (int64_t)sizeof(float) : NULL;
    multiply_columns(part, to, to + STRIP);
}

/* The strips that one of `count` threads computes; rows are quantised already, p->out is [rows][columns / 2]. */
static void gated_share(const struct quantized *p, int64_t which, int64_t count) {
    const int64_t width = p->columns / 2, strips = width / STRIP, size = p->is_bf16 ? 2 : 4;
    char both[GATED_ROWS * 2 * STRIP * 4] __attribute__((aligned(64)));
    for (int64_t column = strips * which / count * STRIP; column < strips * (which + 1) / count * STRIP; column += STRIP)
        for (int64_t row = 0; row < p->rows; row += GATED_ROWS) {
            struct quantized part = *p;
            part.rows = p->rows - row < GATED_ROWS ? p->rows - row : GATED_ROWS;
            part.columns = 2 * STRIP, part.out = both;
            part.numbers += row * p->planes * p->stride, part.row_scales += row;
            if (p->bits == 4) part.group_sums += row * p->planes * (p->stride / GROUP);
            strip_product(&part, p, column, 0);
            strip_product(&part, p, width + column, STRIP);
            const struct gates gates = {
                .x = both, .out = p->out + (row * width + column) * size, .rows = part.rows, .width = STRIP, .out_stride = width,
                .is_bf16 = p->is_bf16};
            gate_rows(&gates, 0, part.rows);
        }
}
