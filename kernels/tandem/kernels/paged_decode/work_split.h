/* Splits a decode among threads; see cpu.c. The including file provides `attend` and `finish`. */

#pragma once

#include "../parallel.h"
#include "decode.h"

typedef void attend_fn(const struct decode *, int64_t, int64_t, int64_t, int64_t, float *, float *);
typedef void finish_fn(const struct decode *, int64_t, int64_t, const float *);
static attend_fn *attend;
static finish_fn *finish;

/* Numbers of keys that a thread should have at least: a region costs microseconds. */
#define MIN_WORK 16384

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
static void run_slice(const struct decode *d, struct share *mine, int64_t from, int64_t to) {
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

/* What thread `which` of `count` computes. */
static void decode_share(const struct decode *d, int64_t which, int64_t count) {
    const int64_t row = all_tokens(d);
    run_slice(d, d->shares + which, row * which / count, row * (which + 1) / count);
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

/* Fewer threads where there is little to do, and memory for what they leave; `close_decode` frees it. */
static enum answer open_decode(struct decode *d) {
    if (is_outside(d)) return OUTSIDE;
    d->threads = threads_for(d->threads, all_tokens(d) * d->width, MIN_WORK);
    d->padded = (d->group + 3) / 4 * 4;
    d->state_floats = 2 * d->padded + d->group * d->width;
    const size_t floats = 2 * d->state_floats + d->group * d->width;
    d->shares = calloc(d->threads, sizeof *d->shares + sizeof(float) * floats);
    if (!d->shares) return NO_MEMORY;
    float *free_floats = (float *)(d->shares + d->threads);
    for (int64_t t = 0; t < d->threads; t++, free_floats += floats) {
        d->shares[t].pair[0] = d->shares[t].pair[1] = -1; /* a region may get fewer threads than it asked for */
        d->shares[t].state[0] = free_floats;
        d->shares[t].state[1] = free_floats + d->state_floats;
        d->shares[t].q = free_floats + 2 * d->state_floats;
    }
    return DONE;
}

static void close_decode(struct decode *d) { free(d->shares); }
