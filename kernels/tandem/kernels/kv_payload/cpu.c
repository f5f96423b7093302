/* The bytes of a KV transfer on the CPU: copy and CRC-32 in one pass, re-blocking, conversion, wire codecs.

   Checks nothing: indices, sizes and addresses were checked by the caller. No state, no allocation, thread-safe.
   CPU features are chosen when the code runs, so the library works on every machine of its architecture.

   crc.h ◀─ stream.h ◀─ stream_x86.h, stream_arm.h ◀─ path.h ◀─ numbers.h ◀─ this file, which Python calls. */

#include "numbers.h"

/* ---- gather and scatter -------------------------------------------------------------------------------------------- */

/* A slice of blocks of a pool [num_blocks, layers, planes, heads, tokens, width], in bytes: for each block, `outer`
   runs `outer_stride` apart, each of `inner` runs `inner_stride` apart, the first at `first`. */
struct slice {
    uint64_t block_stride, first;
    uint64_t outer, outer_stride;
    uint64_t inner, inner_stride;
    uint64_t run;
};

/* A large scatter writes around the caches: its target need not be read first, and what is there stays there. */
#define LARGE_RUN 4096
#define LARGE_PAYLOAD (256 << 10)

/* A place in a slice: run by run through its blocks; stays at the last one. */
struct cursor { size_t b; uint64_t o, i; };

INLINE void step(struct cursor *c, const struct slice *at, size_t n) {
    if (c->i + 1 < at->inner) c->i++;
    else if (c->o + 1 < at->outer) c->i = 0, c->o++;
    else if (c->b + 1 < n) c->i = 0, c->o = 0, c->b++;
}

INLINE uint8_t *place(struct cursor c, uint8_t *pool, const uint32_t *blocks, const struct slice *at) {
    return pool + blocks[c.b] * at->block_stride + at->first + c.o * at->outer_stride + c.i * at->inner_stride;
}

INLINE uint32_t move(uint8_t *pool, const uint32_t *blocks, size_t n, const struct slice *at, uint8_t *payload, int scatter) {
    const struct path path = best_path;
    const int past_cache = scatter && at->run >= LARGE_RUN && n * at->outer * at->inner * at->run >= LARGE_PAYLOAD;
    struct stream s = {.crc = ~0u, .past_cache = past_cache, .is_still = !scatter};
    struct cursor here = {0, 0, 0}, ahead = {0, 0, 0}; /* short runs: several of them ahead */
    for (uint64_t bytes = 0; n && !scatter && bytes < AHEAD; bytes += at->run + 1) step(&ahead, at, n);
    for (uint64_t runs = n * at->outer * at->inner; runs; runs--) {
        uint8_t *run = place(here, pool, blocks, at), *flat = payload + s.copied;
        if (scatter) path.advance(&s, run, flat, at->run, flat + at->run);
        else path.advance(&s, flat, run, at->run, place(ahead, pool, blocks, at));
        step(&here, at, n);
        step(&ahead, at, n);
    }
#if defined(__x86_64__)
    if (past_cache) _mm_sfence(); /* a reader that is notified of these bytes sees them */
#endif
    return path.finish(&s);
}

uint32_t tandem_gather(const uint8_t *pool, const uint32_t *blocks, size_t n, const struct slice *at, uint8_t *payload) {
    return move((uint8_t *)pool, blocks, n, at, payload, 0);
}

uint32_t tandem_scatter(uint8_t *pool, const uint32_t *blocks, size_t n, const struct slice *at, const uint8_t *payload) {
    return move(pool, blocks, n, at, (uint8_t *)payload, 1);
}

/* The same without the CRC, to measure its cost against. */
void tandem_plain_gather(const uint8_t *pool, const uint32_t *blocks, size_t n, const struct slice *at, uint8_t *payload) {
    for (size_t b = 0; b < n; b++)
        for (uint64_t o = 0; o < at->outer; o++)
            for (uint64_t i = 0; i < at->inner; i++, payload += at->run)
                memcpy(payload, pool + blocks[b] * at->block_stride + at->first + o * at->outer_stride + i * at->inner_stride,
                       at->run);
}

void tandem_plain_scatter(uint8_t *pool, const uint32_t *blocks, size_t n, const struct slice *at, const uint8_t *payload) {
    for (size_t b = 0; b < n; b++)
        for (uint64_t o = 0; o < at->outer; o++)
            for (uint64_t i = 0; i < at->inner; i++, payload += at->run)
                memcpy(pool + blocks[b] * at->block_stride + at->first + o * at->outer_stride + i * at->inner_stride, payload,
                       at->run);
}

uint32_t tandem_copy(uint8_t *dst, const uint8_t *src, size_t n) {
    struct stream s = {.crc = ~0u};
    best_path.advance(&s, dst, src, n, src);
    return best_path.finish(&s);
}

/* CRC alone: the bytes go through a buffer that stays in the first cache. */
uint32_t tandem_crc32(const uint8_t *src, size_t n) {
    uint8_t scratch[4096];
    struct stream s = {.crc = ~0u};
    while (n) {
        size_t part = n < sizeof scratch ? n : sizeof scratch;
        best_path.advance(&s, scratch, src, part, src + part);
        src += part, n -= part;
    }
    return best_path.finish(&s);
}

/* Tokens of source blocks into blocks of another size. Source runs are `source_tokens` rows of `row` bytes, found as in
   `slice` with the heads as inner runs of every (layer, plane):

       source   ├─ block 0 ─┤─ block 1 ─┤─ block 2 ─┤
                    ^offset
       target       ├─ block 0 ──────┤─ block 1 ──────┤     past the last source block: zeros */
struct reblock {
    uint64_t block_stride, first;
    uint64_t layers, layer_stride, planes, plane_stride, heads, head_stride;
    uint64_t row, source_tokens, target_tokens, targets, offset;
};

uint32_t tandem_reblock(const uint8_t *pool, const uint32_t *blocks, size_t n, const struct reblock *at, uint8_t *payload) {
    static const uint8_t zeros[4096];
    const struct path path = best_path;
    struct stream s = {.crc = ~0u};
    for (uint64_t t = 0; t < at->targets; t++)
        for (uint64_t l = 0; l < at->layers; l++)
            for (uint64_t p = 0; p < at->planes; p++)
                for (uint64_t h = 0; h < at->heads; h++) {
                    const uint64_t base = at->first + l * at->layer_stride + p * at->plane_stride + h * at->head_stride;
                    uint64_t token = at->offset + t * at->target_tokens, left = at->target_tokens;
                    while (left) {
                        const uint64_t index = token / at->source_tokens, in = token % at->source_tokens;
                        if (index >= n) break;
                        const uint64_t here = at->source_tokens - in < left ? at->source_tokens - in : left;
                        path.advance(&s, payload + s.copied, pool + blocks[index] * at->block_stride + base + in * at->row,
                                     here * at->row, pool);
                        token += here, left -= here;
                    }
                    for (uint64_t bytes = left * at->row; bytes;) {
                        const uint64_t part = bytes < sizeof zeros ? bytes : sizeof zeros;
                        path.advance(&s, payload + s.copied, zeros, part, zeros);
                        bytes -= part;
                    }
                }
    return path.finish(&s);
}

/* ---- conversion and codecs ------------------------------------------------------------------------------------------ */

void tandem_convert(int from, int to, const uint8_t *src, uint8_t *dst, size_t n) { DISPATCH(convert, from, to, src, dst, n); }

void tandem_encode(int codec, int from, const uint8_t *src, uint8_t *scales, uint8_t *codes, size_t rows, size_t n) {
    DISPATCH(encode, codec, from, src, scales, codes, rows, n);
}

void tandem_decode(int codec, int to, const uint8_t *scales, const uint8_t *codes, uint8_t *dst, size_t rows, size_t n) {
    DISPATCH(decode, codec, to, scales, codes, dst, rows, n);
}
