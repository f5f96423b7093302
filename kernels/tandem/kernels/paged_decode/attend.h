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

static inline void find_tokens(const struct decode *d, int64_t sequence, int64_t head, int64_t low, int64_t high,
                               struct tokens *found) {
    const char *base = d->pool + head * d->head_bytes;
    const int32_t *table = d->table + sequence * d->table_stride;
    const int64_t row_bytes = d->width * (d->kv_is_bf16 ? 2 : 4);
    found->count = high - low < TILE ? high - low : TILE;
    for (int64_t t = 0; t < found->count; t++) {
        const int64_t token = low + t;
        found->rows[t] = base + table[token / d->block_tokens] * d->block_bytes + token % d->block_tokens * row_bytes;
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

/* Fetches what comes after this token, so that memory is read while scores are computed. */
static inline void fetch_ahead(const struct decode *d, const struct tokens *next, int64_t token) {
    if (token >= next->count) return;
    const char *row = next->rows[token];
    for (int64_t i = 0; i < d->width * (d->kv_is_bf16 ? 2 : 4); i += 64) {
        __builtin_prefetch(row + i);
        __builtin_prefetch(row + d->plane_bytes + i);
    }
}
#endif

/* Scores of a tile's tokens for MANY of four heads. `next` is fetched meanwhile. */
FN void NAME(score)(const struct decode *d, const float *q, const struct tokens *here, const struct tokens *next,
                    float *scores, const int MANY, const int is_bf16) {
    const int64_t width = d->width, count = here->count;
    const char *const *rows = here->rows;
    for (int64_t t = 0; t < count; t++) {
        fetch_ahead(d, next, t);
        VEC sum[HEADS] = {NAME(zero)(), NAME(zero)(), NAME(zero)(), NAME(zero)()};
        for (int64_t i = 0; i < width; i += LANES) {
            const VEC key = NAME(load)(rows[t], i, is_bf16);
            for (int g = 0; g < MANY; g++) sum[g] = NAME(fma)(NAME(load_f32)(q + g * width + i), key, sum[g]);
        }
        _mm_storeu_ps(scores + HEADS * t, NAME(sums)(sum[0], sum[1], sum[2], sum[3]));
    }
    for (int64_t t = count; t < next->count; t++) fetch_ahead(d, next, t);
}

/* Adds the values of `count` tokens, times their weights, to `acc` [MANY][width], which is multiplied by `kept`. */
FN void NAME(gather)(const struct decode *d, float *acc, const float *kept, const char *const *rows, int64_t count,
                     const float *weights, const int MANY, const int is_bf16) {
    const int64_t width = d->width;
    for (int64_t i = 0; i < width; i += 16) {
        enum { PARTS = 16 / LANES };
        VEC sum[HEADS][PARTS];
        for (int g = 0; g < MANY; g++)
            for (int p = 0; p < PARTS; p++)
                sum[g][p] = NAME(mul)(NAME(load_f32)(acc + g * width + i + p * LANES), NAME(all)(kept[g]));
        for (int64_t t = 0; t < count; t++)
            for (int p = 0; p < PARTS; p++) {
                const VEC value = NAME(load)(rows[t] + d->plane_bytes, i + p * LANES, is_bf16);
                for (int g = 0; g < MANY; g++) sum[g][p] = NAME(fma)(NAME(all)(weights[HEADS * t + g]), value, sum[g][p]);
            }
        for (int g = 0; g < MANY; g++)
            for (int p = 0; p < PARTS; p++) NAME(store_f32)(acc + g * width + i + p * LANES, sum[g][p]);
    }
}

/* One tile for four heads: `most` and `total` [4] are the running maxima and sums. */
FN void NAME(attend_tile)(const struct decode *d, const float *q, const struct tokens *here, const struct tokens *next,
                          float *most, float *total, float *acc, const int MANY, const int is_bf16) {
    float scores[TILE * HEADS], lanes[LANES], kept[HEADS];
    const int64_t count = here->count;
    NAME(score)(d, q, here, next, scores, MANY, is_bf16);
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
    NAME(gather)(d, acc, kept, here->rows, count, scores, MANY, is_bf16);
}

FN void NAME(attend_tile_of)(const struct decode *d, const float *q, const struct tokens *here, const struct tokens *next,
                             float *most, float *total, float *acc, int group, const int is_bf16) {
    switch (group) {
    case 1: NAME(attend_tile)(d, q, here, next, most, total, acc, 1, is_bf16); break;
    case 2: NAME(attend_tile)(d, q, here, next, most, total, acc, 2, is_bf16); break;
    case 3: NAME(attend_tile)(d, q, here, next, most, total, acc, 3, is_bf16); break;
    default: NAME(attend_tile)(d, q, here, next, most, total, acc, 4, is_bf16);
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
    const struct tokens none = {.count = 0};
    for (int64_t low = from; low < to; low += TILE) {
        struct tokens here, next;
        find_tokens(d, sequence, head, low, to, &here);
        find_next(d, sequence, head, low, to, &next);
        for (int64_t g = 0; g < group; g += HEADS) {
            const int many = (int)(group - g < HEADS ? group - g : HEADS);
            float *into = acc + g * width;
            const struct tokens *ahead = g ? &none : &next; /* once is enough */
            if (d->kv_is_bf16) NAME(attend_tile_of)(d, q + g * width, &here, ahead, most + g, total + g, into, many, 1);
            else NAME(attend_tile_of)(d, q + g * width, &here, ahead, most + g, total + g, into, many, 0);
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
