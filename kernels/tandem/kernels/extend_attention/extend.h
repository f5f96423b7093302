/* Chunks of queries over paged keys and values; see cpu.c. */

#pragma once

#include "extend_args.h"

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

/* C[32][32] = A · B, or is added to; C's rows are ROWS numbers long. A: 32 rows, `a_bytes` from one to the next, of which a
   step takes 32 numbers and goes on by `a_step` bytes. B: for each step two tiles of [16 pairs][16 columns][2], side by side.
*/
typedef void product_fn(float *c, int is_added, const uint16_t *a, int64_t a_bytes, int64_t a_step, const uint16_t *b,
                        int64_t steps);
#define TILE 512 /* numbers of a tile of B */
