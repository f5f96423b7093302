/* Chunks of queries over paged keys and values; see cpu.c. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ROWS 32  /* queries of a tile: tokens, and the heads of a GQA group for each */
#define STEP 32  /* keys of a step of the second product, and of what is packed at once */
#define SPAN 128 /* keys between two looks at the maxima */
#define MOST_WIDTH 256
#define AVX2_ROWS 24 /* of a tile with AVX2 */
#define LEAST -1e30f /* below every score, before the first one */

struct extend {
    const uint16_t *q;
    const char *pool; /* the first key of block 0, head 0 */
    uint16_t *out;
    const int32_t *table, *starts, *lens;
    const float *sinks; /* of all query heads, or NULL */
    char *room;         /* see `_room_bytes` in __init__.py */
    int64_t sequences, kv_heads, group, width, block_tokens;
    int64_t q_stride, head_stride, table_stride;  /* of tokens, of heads, of rows of the table, in numbers */
    int64_t block_bytes, plane_bytes, head_bytes; /* strides of the pool */
    int64_t window;                               /* 0 = all are seen */
    int64_t threads;
    double softcap; /* 0 = none */
    /* From here on not the caller's. */
    float scale;
    int64_t sequence; /* the one at work */
    int64_t oldest, begin, padded; /* the first key that is seen, its step, and how many are packed */
    int64_t parts, tiles;
    uint16_t *keys, *values; /* with AVX2, of float32 */
    int64_t next_part, next_tile;
};

/* C[32][32] = A · B, or is added to; C's rows are ROWS numbers long. A: 32 rows, `a_bytes` from one to the next, of which a
   step takes 32 numbers and goes on by `a_step` bytes. B: for each step two tiles of [16 pairs][16 columns][2], side by side.
*/
typedef void product_fn(float *c, int is_added, const uint16_t *a, int64_t a_bytes, int64_t a_step, const uint16_t *b,
                        int64_t steps);
#define TILE 512 /* numbers of a tile of B */
