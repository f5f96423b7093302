/* One piece of a decode: the queries of a GQA group over some tokens of one sequence and KV head. Compiled once a set of
   vector instructions, see vectors.h.

   A tile of keys is multiplied with four query heads at a time; scores lie as [token][4], so that four sums fill a
   quarter of a vector. Softmax runs on along the tiles (FlashAttention-2, section 3.1); everything is in float32. */

#ifndef TILE
#define TILE 64
#define HEADS 4
#endif

/* The rows of up to TILE tokens' keys, and how many they are. */
#ifndef TOKENS
#define TOKENS
struct tokens { const char *rows[TILE]; int64_t count; };
static const struct tokens no_tokens;

static inline void find_tokens(const struct decode *d, int64_t sequence, int64_t head, int64_t low, int64_t high,
                               struct tokens *found) {
    const char *base = d->pool + head * d->head_bytes;
    const int32_t *table = d->table + sequence * d->table_stride;
    const int64_t row_bytes = d->width * (d->kv_is_bf16 ? 2 : 4);
    found->count = high - low < TILE ? high - low : TILE;
    int64_t t = 0, block = low / d->block_tokens, offset = low % d->block_tokens;
    for (; t < found->count; block++, offset = 0) {
        const char *row = base + table[block] * d->block_bytes + offset * row_bytes;
        for (; offset < d->block_tokens && t < found->count; offset++, row += row_bytes) found->rows[t++] = row;
    }
}

/* The tile behind [low, low + TILE): of this pair up to `to`, or the first one of the next pair, which the same thread takes
   more often than not. */
static inline void find_next(const struct decode *d, int64_t sequence, int64_t head, int64_t low, int64_t to,
                             struct tokens *found) {
    found->count = 0;
    if (low + TILE < to) {
        find_tokens(d, sequence, head, low + TILE, to, found);
        return;
    }
    if (++head == d->kv_heads) head = 0, sequence++;
    if (sequence < d->batch) find_tokens(d, sequence, head, 0, d->lens[sequence], found);
}

/* Fetches a token's key, or with the plane's bytes its value: keys of the next tile while scores of this one are computed,
   values while its values are added up, so that memory is read all the time. */
static inline __attribute__((always_inline)) void fetch_ahead(
    const struct tokens *next, int64_t token, int64_t plane_bytes, int64_t row_bytes) {
    if (token >= next->count) return;
    const char *row = next->rows[token] + plane_bytes;
    for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(row + i);
}
#endif

#undef MOST_PARTS
#define MOST_PARTS (ISA == 512 ? 4 : 2)

/* Scores of a tile's tokens for MANY of four heads. `next` is fetched meanwhile. WIDTH is that of a head, or 0: a width known
   here keeps queries in registers. */
FN void NAME(score)(const struct decode *d, const float *restrict q, const struct tokens *here, const struct tokens *next,
                    float *restrict scores, const int MANY, const int WIDTH, const int is_bf16) {
    const int64_t width = WIDTH ? WIDTH : d->width, row_bytes = width * (is_bf16 ? 2 : 4), count = here->count;
    const char *const *rows = here->rows;
    for (int64_t t = 0; t < count; t++) {
        fetch_ahead(next, t, 0, row_bytes);
        VEC sum[HEADS] = {NAME(zero)(), NAME(zero)(), NAME(zero)(), NAME(zero)()};
#pragma GCC unroll 4
        for (int64_t i = 0; i < width; i += LANES) {
            const VEC key = NAME(load)(rows[t], i, is_bf16);
            for (int g = 0; g < MANY; g++) sum[g] = NAME(fma)(NAME(load_f32)(q + g * width + i), key, sum[g]);
        }
        _mm_storeu_ps(scores + HEADS * t, NAME(sums)(sum[0], sum[1], sum[2], sum[3]));
    }
    for (int64_t t = count; t < next->count; t++) fetch_ahead(next, t, 0, row_bytes);
}

/* PARTS vectors of `gather`, from place `i` of a row on. */
FN void NAME(gather_part)(const struct decode *d, float *restrict acc, const float *kept, const struct tokens *here,
                          const struct tokens *next, const float *restrict weights, int64_t i, const int PARTS, const int MANY, const int is_bf16) {
    const int64_t width = d->width, plane = d->plane_bytes, row_bytes = width * (is_bf16 ? 2 : 4), count = here->count;
    const char *const *rows = here->rows;
    VEC sum[HEADS][MOST_PARTS];
    for (int g = 0; g < MANY; g++)
        for (int p = 0; p < PARTS; p++)
            sum[g][p] = NAME(mul)(NAME(load_f32)(acc + g * width + i + p * LANES), NAME(all)(kept[g]));
    for (int64_t t = 0; t < count; t++) {
        VEC value[MOST_PARTS];
        fetch_ahead(next, t, plane, row_bytes);
        for (int p = 0; p < PARTS; p++) value[p] = NAME(load)(rows[t] + plane, i + p * LANES, is_bf16);
        for (int g = 0; g < MANY; g++) {
            const VEC weight = NAME(all)(weights[HEADS * t + g]);
            for (int p = 0; p < PARTS; p++) sum[g][p] = NAME(fma)(weight, value[p], sum[g][p]);
        }
    }
    for (int g = 0; g < MANY; g++)
        for (int p = 0; p < PARTS; p++) NAME(store_f32)(acc + g * width + i + p * LANES, sum[g][p]);
}

/* Adds the tokens' values, times their weights, to `acc` [MANY][width], which is multiplied by `kept`. So many sums at a
   time that none waits for the one before it. */
FN void NAME(gather)(const struct decode *d, float *acc, const float *kept, const struct tokens *here, const struct tokens *next,
                     const float *weights, const int MANY, const int is_bf16) {
    int64_t i = 0;
    for (; i + MOST_PARTS * LANES <= d->width; i += MOST_PARTS * LANES)
        NAME(gather_part)(d, acc, kept, here, i ? &no_tokens : next, weights, i, MOST_PARTS, MANY, is_bf16);
    for (; i < d->width; i += 16)
        NAME(gather_part)(d, acc, kept, here, i ? &no_tokens : next, weights, i, 16 / LANES, MANY, is_bf16);
    for (int64_t t = here->count; t < next->count; t++) fetch_ahead(next, t, d->plane_bytes, d->width * (is_bf16 ? 2 : 4));
}

/* One tile for four heads: `most` and `total` [4] are the running maxima and sums. */
FN void NAME(attend_tile)(const struct decode *d, const float *q, const struct tokens *here, const struct tokens *next,
                          float *most, float *total, float *acc, const int MANY, const int WIDTH, const int is_bf16) {
    float scores[TILE * HEADS], lanes[LANES], kept[HEADS];
    const int64_t count = here->count;
    NAME(score)(d, q, here, next, scores, MANY, WIDTH, is_bf16);
    const int64_t filled = (count * HEADS + LANES - 1) / LANES * LANES;
    for (int64_t i = count * HEADS; i < filled; i++) scores[i] = -INFINITY;
    VEC highest = NAME(load_f32)(scores), sum = NAME(zero)();
    for (int64_t i = LANES; i < filled; i += LANES) highest = NAME(most)(highest, NAME(load_f32)(scores + i));
    NAME(store_f32)(lanes, highest);
    for (int g = 0; g < HEADS; g++) {
        float above = most[g];
        for (int i = g; i < LANES; i += HEADS) above = lanes[i] > above ? lanes[i] : above;
        kept[g] = expf(most[g] - above);
        most[g] = above;
    }
    for (int i = 0; i < LANES; i++) lanes[i] = -most[i % HEADS];
    const VEC down = NAME(load_f32)(lanes);
    for (int64_t i = 0; i < filled; i += LANES) {
        const VEC weight = NAME(exp)(NAME(add)(NAME(load_f32)(scores + i), down));
        NAME(store_f32)(scores + i, weight);
        sum = NAME(add)(sum, weight);
    }
    NAME(store_f32)(lanes, sum);
    for (int g = 0; g < HEADS; g++) {
        total[g] *= kept[g];
        for (int i = g; i < LANES; i += HEADS) total[g] += lanes[i];
    }
    NAME(gather)(d, acc, kept, here, next, scores, MANY, is_bf16);
}

FN void NAME(attend_tile_of)(const struct decode *d, const float *q, const struct tokens *here, const struct tokens *next,
                             float *most, float *total, float *acc, int group, const int WIDTH, const int is_bf16) {
    switch (group) {
    case 1: NAME(attend_tile)(d, q, here, next, most, total, acc, 1, WIDTH, is_bf16); break;
    case 2: NAME(attend_tile)(d, q, here, next, most, total, acc, 2, WIDTH, is_bf16); break;
    case 3: NAME(attend_tile)(d, q, here, next, most, total, acc, 3, WIDTH, is_bf16); break;
    default: NAME(attend_tile)(d, q, here, next, most, total, acc, 4, WIDTH, is_bf16);
    }
}

/* Tokens [from, to) of a sequence and KV head into `state`, which is begun anew; see `struct decode` for its parts. */
ENTRY void NAME(attend)(const struct decode *d, int64_t sequence, int64_t head, int64_t from, int64_t to, float *state,
                        float *q) {
    const int64_t group = d->group, width = d->width, padded = d->padded;
    float *most = state, *total = state + padded, *acc = state + 2 * padded;
    for (int64_t i = 0; i < padded; i++) most[i] = -INFINITY, total[i] = 0.0f;
    memset(acc, 0, sizeof(float) * group * width);
    const VEC scale = NAME(all)(d->scale);
    for (int64_t i = 0; i < group * width; i += LANES) {
        const int64_t place = sequence * d->q_stride + head * group * width + i;
        NAME(store_f32)(q + i, NAME(mul)(NAME(load)(d->q, place, d->q_is_bf16), scale));
    }
    for (int64_t low = from; low < to; low += TILE) {
        struct tokens here, next;
        find_tokens(d, sequence, head, low, to, &here);
        find_next(d, sequence, head, low, to, &next);
        for (int64_t g = 0; g < group; g += HEADS) {
            const int many = (int)(group - g < HEADS ? group - g : HEADS);
            float *into = acc + g * width;
            const struct tokens *ahead = g ? &no_tokens : &next; /* once is enough */
            const float *heads = q + g * width;
            if (!d->kv_is_bf16) NAME(attend_tile_of)(d, heads, &here, ahead, most + g, total + g, into, many, 0, 0);
            else if (width == 64) NAME(attend_tile_of)(d, heads, &here, ahead, most + g, total + g, into, many, 64, 1);
            else if (width == 128) NAME(attend_tile_of)(d, heads, &here, ahead, most + g, total + g, into, many, 128, 1);
            else NAME(attend_tile_of)(d, heads, &here, ahead, most + g, total + g, into, many, 0, 1);
        }
    }
}

/* What a state has come to, into the output; nothing was seen where the total is zero. A sink adds to the total alone. */
ENTRY void NAME(finish)(const struct decode *d, int64_t sequence, int64_t head, const float *state) {
    const int64_t width = d->width;
    for (int64_t g = 0; g < d->group; g++) {
        float total = state[d->padded + g];
        if (d->sinks) total += expf(d->sinks[head * d->group + g] - state[g]);
        const VEC share = NAME(all)(total > 0.0f ? 1.0f / total : 0.0f);
        const int64_t place = ((sequence * d->kv_heads + head) * d->group + g) * width;
        for (int64_t i = 0; i < width; i += LANES)
            NAME(store)(d->out, place + i, d->q_is_bf16,
                        NAME(mul)(NAME(load_f32)(state + 2 * d->padded + g * width + i), share));
    }
}
