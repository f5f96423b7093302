/* Decode attention over head-major blocks on the CPU: keys and values are read once, where they lie.

   All tokens of all (sequence, KV head) pairs stand in one row, of which each thread takes an equal share:

       ├─ sequence 0, head 0 ─┼─ sequence 0, head 1 ─┼─ sequence 1, head 0 ─┤
       ├─ thread 0 ──────────────────┼─ thread 1 ───────────────────────────┤

   A pair that is cut leaves a part with each thread; the parts are merged when all have ended (Flash-Decoding). Shapes
   and types are the caller's to check, blocks and lengths are checked here. One parallel region a call; thread-safe. */

#include "../instructions.h"
#include "../region.h"

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

#if defined(__x86_64__)
#define ISA 512
#include "../vectors.h"
#include "attend.h"
#undef ISA
#define ISA 256
#include "../vectors.h"
#include "attend.h"
#undef ISA
#endif

typedef void attend_fn(const struct decode *, int64_t, int64_t, int64_t, int64_t, float *, float *);
typedef void finish_fn(const struct decode *, int64_t, int64_t, const float *);
static attend_fn *attend;
static finish_fn *finish;

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_instructions(name, AVX512);
#if defined(__x86_64__)
    if (chosen == AVX512) attend = attend_avx512, finish = finish_avx512;
    if (chosen == AVX2) attend = attend_avx2, finish = finish_avx2;
#endif
    return chosen;
}

/* Numbers of keys that a thread should have at least: a region costs microseconds. */
#define LEAST_SHARE 16384

enum answer { DONE = 0, NO_MEMORY = 1, OUTSIDE = 2 };

/* Whether a block is asked for that the table or the pool has not got. */
static int is_outside(const struct decode *d) {
    for (int64_t sequence = 0; sequence < d->batch; sequence++) {
        const int64_t blocks = (d->lens[sequence] + d->block_tokens - 1) / d->block_tokens;
        if (d->lens[sequence] < 0 || blocks > d->max_blocks) return 1;
        for (int64_t i = 0; i < blocks; i++) {
            const int32_t block = d->table[sequence * d->table_stride + i];
            if (block < 0 || block >= d->num_blocks) return 1;
        }
    }
    return 0;
}

static int64_t all_tokens(const struct decode *d) {
    int64_t tokens = 0;
    for (int64_t sequence = 0; sequence < d->batch; sequence++) tokens += d->lens[sequence] * d->kv_heads;
    return tokens;
}

/* The part [from, to) of the row of all tokens. */
static void take_share(const struct decode *d, struct share *mine, int64_t from, int64_t to) {
    int64_t begin = 0, parts = 0;
    mine->pair[0] = mine->pair[1] = -1;
    for (int64_t sequence = 0; sequence < d->batch; sequence++) {
        const int64_t length = d->lens[sequence];
        for (int64_t head = 0; head < d->kv_heads && length; head++, begin += length) {
            const int64_t low = from > begin ? from - begin : 0, high = to - begin < length ? to - begin : length;
            if (low >= high) continue;
            const int is_whole = low == 0 && high == length;
            float *state = mine->state[parts];
            attend(d, sequence, head, low, high, state, mine->q);
            if (is_whole) finish(d, sequence, head, state);
            else mine->pair[parts++] = sequence * d->kv_heads + head;
        }
    }
}

static void share_out(void *data) {
    const struct decode *d = data;
    const int64_t count = threads(d->threads), which = thread(d->threads);
    const int64_t row = all_tokens(d);
    take_share(d, d->shares + which, row * which / count, row * (which + 1) / count);
}

/* Adds `from` to `into`: both relate to maxima of their own. */
static void merge(const struct decode *d, float *into, const float *from) {
    for (int64_t g = 0; g < d->group; g++) {
        const float above = into[g] > from[g] ? into[g] : from[g];
        const float kept = expf(into[g] - above), added = expf(from[g] - above);
        into[g] = above;
        into[d->padded + g] = into[d->padded + g] * kept + from[d->padded + g] * added;
        float *sums = into + 2 * d->padded + g * d->width;
        const float *others = from + 2 * d->padded + g * d->width;
        for (int64_t i = 0; i < d->width; i++) sums[i] = sums[i] * kept + others[i] * added;
    }
}

static void merge_parts(const struct decode *d) {
    int64_t pair = -1;
    float *state = NULL;
    for (int64_t t = 0; t < d->threads; t++)
        for (int part = 0; part < 2; part++) {
            const struct share *theirs = d->shares + t;
            if (theirs->pair[part] < 0) continue;
            if (theirs->pair[part] == pair) {
                merge(d, state, theirs->state[part]);
                continue;
            }
            if (pair >= 0) finish(d, pair / d->kv_heads, pair % d->kv_heads, state);
            pair = theirs->pair[part], state = theirs->state[part];
        }
    if (pair >= 0) finish(d, pair / d->kv_heads, pair % d->kv_heads, state);
}

/* `given` are the fields of `struct decode` up to `threads`, each of 8 bytes. Answers with an `enum answer`. */
int tandem_paged_decode(const int64_t *given, float scale) {
    struct decode d;
    memset(&d, 0, sizeof d);
    memcpy(&d, given, offsetof(struct decode, scale));
    d.scale = scale;
    if (is_outside(&d)) return OUTSIDE;
    const int64_t useful = 1 + all_tokens(&d) * d.width / LEAST_SHARE;
    if (d.threads > useful) d.threads = useful;
    d.padded = (d.group + 3) / 4 * 4;
    d.state_floats = 2 * d.padded + d.group * d.width;
    const size_t floats = 2 * d.state_floats + d.group * d.width;
    d.shares = calloc(d.threads, sizeof *d.shares + sizeof(float) * floats);
    if (!d.shares) return NO_MEMORY;
    float *free_floats = (float *)(d.shares + d.threads);
    for (int64_t t = 0; t < d.threads; t++, free_floats += floats) {
        d.shares[t].pair[0] = d.shares[t].pair[1] = -1; /* a region may get fewer threads than it asked for */
        d.shares[t].state[0] = free_floats;
        d.shares[t].state[1] = free_floats + d.state_floats;
        d.shares[t].q = free_floats + 2 * d.state_floats;
    }
    const size_t row_bytes = d.kv_heads * d.group * d.width * (d.q_is_bf16 ? 2 : 4);
    for (int64_t sequence = 0; sequence < d.batch; sequence++)
        if (!d.lens[sequence]) memset(d.out + sequence * row_bytes, 0, row_bytes);
    run_region(share_out, &d, d.threads);
    merge_parts(&d);
    free(d.shares);
    return DONE;
}
