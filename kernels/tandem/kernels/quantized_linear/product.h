/* Products of rows with a quantised weight; see cpu.c for the numbers. rows.h and columns.h have the code, once a set of
   instructions; the including file sets the pointers. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define GROUP 32  /* inner numbers of 4 bits that share a scale and an offset */
#define COLUMNS 64 /* of a block of the weight */
#define GROUP_BYTES (2 * COLUMNS + COLUMNS * GROUP / 2)
#define TILE_NUMBERS 64 /* inner numbers of a tile of the matrix unit */
#define LEAST_TILE_ROWS 4 /* rows of `numbers`; fewer are faster one by one */
#define FEW_ROWS 4        /* rows of `numbers`; more gain from unpacking 4 bits */
#define UNPACKED_BLOCKS 2
#define OUTLIER_STEP 128
#define MOST_OUTLIERS 32 /* OUTLIERS in reference.py */
#define PLANE 255 /* a number of two bytes is 255 · higher + lower, both from -127 to 127 */

struct quantized {
    const char *x;       /* [rows][inner] in float32 or bfloat16 */
    const char *weight;  /* packed */
    const float *scales; /* of columns */
    const int32_t *sums; /* of 8 bits: minus the sums of columns; else NULL */
    const char *bias;    /* float32, of columns, or NULL */
    char *out;           /* [rows][columns], contiguous, as x */
    int64_t rows, inner, columns;
    int64_t x_stride;           /* from row to row, in numbers */
    int64_t block_bytes;        /* from one block of COLUMNS of the weight to the next */
    int64_t bits, is_bf16;
    int64_t planes;      /* bytes of a row's number: 1, or 2, of which the first row of `numbers` has the higher */
    uint8_t *numbers;    /* room for `planes` rows of `stride` bytes a row */
    float *row_scales;   /* room for a scale a row */
    int32_t *group_sums; /* of 4 bits: room for the sum of every group of a row of `numbers` */
    int64_t stride;          /* a multiple of GROUP; of 8 bits on a matrix unit of TILE_NUMBERS */
    int64_t x_inner;         /* numbers of a row of x */
    const int32_t *outliers; /* [inner - x_inner] columns of x whose numbers, over OUTLIER_STEP, follow them */
    char *blocks; /* of 4 bits: room in which each thread unpacks blocks to 8 bits; NULL = multiplied as they lie */
    int64_t threads;
};

typedef void quantize_fn(const struct quantized *, int64_t first, int64_t last);
typedef void quantized_columns_fn(const struct quantized *, int64_t first, int64_t last);
static quantize_fn *quantize_rows;
static quantized_columns_fn *quantized_columns;
static quantized_columns_fn *quantized_tiles; /* for rows of 8 bits enough to fill tiles; NULL without a matrix unit */
static int64_t quantized_lanes;
static void (*unpack_block)(const struct quantized *, int64_t block, char *out);

/* True if rows meet numbers of 8 bits. */
static inline int has_bytes(const struct quantized *p) { return p->bits == 8 || p->blocks; }

/* With the weight as it lies. Tiles need rows of whole tiles, filled up with zeros. */
static void multiply_columns(const struct quantized *p, int64_t first, int64_t last) {
    const int may_tile = quantized_tiles && p->bits == 8 && p->stride % TILE_NUMBERS == 0;
    if (may_tile && p->rows * p->planes >= LEAST_TILE_ROWS) quantized_tiles(p, first, last);
    else quantized_columns(p, first, last);
}

/* The block that has this column as one of 8 bits, in one of UNPACKED_BLOCKS places of a thread: all of its weight. */
static struct quantized unpacked(const struct quantized *p, int64_t column, int64_t which, int64_t place) {
    const int64_t bytes = (p->inner + GROUP - 1) / GROUP * GROUP * COLUMNS + TILE_NUMBERS * COLUMNS;
    char *to = p->blocks + (which * UNPACKED_BLOCKS + place) * bytes;
    unpack_block(p, column / COLUMNS, to);
    struct quantized block = *p;
    block.weight = to, block.block_bytes = 0, block.bits = 8;
    return block;
}

/* The columns that one of `count` threads computes; rows are quantised already. */
static void quantized_share(const struct quantized *p, int64_t which, int64_t count) {
    const int64_t vectors = (p->columns + quantized_lanes - 1) / quantized_lanes;
    const int64_t first = vectors * which / count * quantized_lanes, last = vectors * (which + 1) / count * quantized_lanes;
    if (!p->blocks) multiply_columns(p, first, last);
    else
        for (int64_t column = first, next; column < last; column = next) {
            next = (column / COLUMNS + 1) * COLUMNS < last ? (column / COLUMNS + 1) * COLUMNS : last;
            const struct quantized block = unpacked(p, column, which, 0);
            multiply_columns(&block, column, next);
        }
}
