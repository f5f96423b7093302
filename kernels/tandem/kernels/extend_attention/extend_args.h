/* What attention of chunks is given; see cpu.c. */

#pragma once

#include <stdint.h>

struct extend {
    const uint16_t *q;
    const char *pool; /* the first key of block 0, head 0 */
    uint16_t *out;
    const int32_t *table, *starts, *lens;
    const float *sinks; /* of all query heads, or NULL */
    char *room;         /* see `room_bytes` in __init__.py */
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

/* `tandem_extend_check` answers with 0 or an `enum answer` of cpu.c. Behind it all threads of a region may call
   `tandem_extend_share`, with `sequence` at -1; they meet at its end. */
typedef int extend_check_fn(const struct extend *, int64_t num_blocks, int64_t max_blocks, int64_t rows);
typedef void extend_share_fn(struct extend *, int64_t which, int64_t count);
