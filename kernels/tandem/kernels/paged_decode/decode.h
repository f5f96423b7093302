/* Sequences to decode; see cpu.c. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct decode {
    const char *q, *pool; /* the first key of block 0, head 0 */
    char *out;
    const int32_t *table, *lens;
    const float *sinks; /* of all query heads, or NULL */
    int64_t batch, kv_heads, group, width, block_tokens;
    int64_t num_blocks, max_blocks;                /* of the pool, of a row of the table */
    int64_t q_stride, table_stride;                /* from sequence to sequence, in numbers */
    int64_t block_bytes, plane_bytes, head_bytes;  /* strides of the pool */
    int64_t q_is_bf16, kv_is_bf16;                 /* or float32 */
    int64_t threads;
    /* From here on not the caller's. A state is [padded] maxima, [padded] totals and [group][width] sums. */
    float scale;
    int64_t padded, state_floats;
    struct share *shares;
};

/* What a thread leaves: the states of the first and the last pair it had, where others had a part of them, too. */
struct share { int64_t pair[2]; float *state[2], *q; };
