/* Copying and summing in one pass: the parts that all paths share, and the path by tables. */

#pragma once

#include "crc.h"

/* A stream: bytes copied run by run while their CRC is taken.

   The CRC is taken a stripe at a time. What a run leaves of a stripe is kept in `part` until the next run fills it:

       ├── folded ──────────────┤── copied, and kept in part: less than a stripe ──┤ …

   The source of a scatter lies in memory that its sender may still write, if it is broken: so it is read once, and what
   was read is both summed and written. */

#define MAX_STRIPE 256

struct stream {
    size_t copied, pending; /* bytes so far; those of them in `part` */
    uint32_t crc;           /* register of the table and ARM paths */
    int has_begun;
    int past_cache; /* write around the caches */
    int is_still;   /* the source is not written meanwhile: it may be read twice */
    uint8_t part[MAX_STRIPE] __attribute__((aligned(64)));
    uint8_t acc[MAX_STRIPE] __attribute__((aligned(64))); /* what the folded bytes have become */
};

/* `next` is where the following run is read, for the prefetch: AHEAD bytes cover the time that memory needs. */
typedef void advance_fn(struct stream *s, uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next);
typedef uint32_t finish_fn(struct stream *s);

#define AHEAD 8192

static int has_fast_strings; /* `rep movsb` that moves whole lines, ERMS */

INLINE void copy_string(uint8_t *dst, const uint8_t *src, size_t n) {
#if defined(__x86_64__)
    __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(n) : : "memory");
#else
    memcpy(dst, src, n);
#endif
}

/* Copies `n` bytes, less than is left of a stripe, by way of `part`. */
INLINE void keep(struct stream *s, uint8_t *dst, const uint8_t *src, size_t n) {
    uint8_t *kept = s->part + s->pending;
    memcpy(kept, src, n);
    __asm__ volatile("" : : "r"(kept) : "memory"); /* or the compiler may read `src` again instead */
    memcpy(dst, kept, n);
    s->pending += n;
}

enum target { NOWHERE, CACHED, PAST_CACHE };

/* Copies `n` bytes, by whole stripes of STRIPE bytes where it can. BEGIN, FOLD: take a stripe into the accumulators;
   FOLD copies it to its target, too. */
#define DEFINE_ADVANCE(NAME, TARGET, STRIPE, STATE, LOAD, BEGIN, FOLD, STORE)                                          \
    TARGET static void NAME(struct stream *s, uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next) {       \
        s->copied += n;                                                                                                \
        if (s->pending + n < STRIPE) {                                                                                 \
            keep(s, dst, src, n);                                                                                      \
            return;                                                                                                    \
        }                                                                                                              \
        STATE state = LOAD(s);                                                                                         \
        if (s->pending || !s->has_begun) {                                                                             \
            const size_t head = STRIPE - s->pending;                                                                   \
            keep(s, dst, src, head);                                                                                   \
            state = s->has_begun ? FOLD(state, NOWHERE, NULL, s->part) : BEGIN(s->part);                               \
            s->has_begun = 1;                                                                                          \
            s->pending = 0;                                                                                            \
            dst += head, src += head, n -= head;                                                                       \
        }                                                                                                              \
        const size_t whole = n / STRIPE * STRIPE, until = whole > AHEAD ? whole - AHEAD : 0;                           \
        if (s->past_cache && (uintptr_t)dst % 64 == 0)                                                                 \
            for (size_t i = 0; i < whole; i += STRIPE) state = FOLD(state, PAST_CACHE, dst + i, src + i);              \
        else if (STRIPE == MAX_STRIPE && s->is_still && has_fast_strings && whole >= 2 * AHEAD)                        \
            for (size_t i = 0; i < whole;) { /* sum a part into the first cache, then copy it without reading dst */   \
                const size_t begin = i, end = whole - i < AHEAD ? whole : i + AHEAD;                                   \
                for (; i < end; i += STRIPE) {                                                                         \
                    const uint8_t *ahead = i < until ? src + i + AHEAD : next + (i - until);                           \
                    for (int k = 0; k < STRIPE; k += 64) __builtin_prefetch(ahead + k, 0, 3);                          \
                    state = FOLD(state, NOWHERE, NULL, src + i);                                                       \
                }                                                                                                      \
                copy_string(dst + begin, src + begin, end - begin);                                                    \
            }                                                                                                          \
        else                                                                                                           \
            for (size_t i = 0; i < whole; i += STRIPE) {                                                               \
                const uint8_t *ahead = i < until ? src + i + AHEAD : next + (i - until);                               \
                for (int k = 0; k < STRIPE; k += 64) __builtin_prefetch(ahead + k, 0, 3);                              \
                state = FOLD(state, CACHED, dst + i, src + i);                                                         \
            }                                                                                                          \
        STORE(s, state);                                                                                               \
        keep(s, dst + whole, src + whole, n - whole);                                                                  \
    }

/* Tables: the copy goes ahead; the CRC of what was written follows while it is in the first cache. */

static void advance_by_table(struct stream *s, uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next) {
    (void)next;
    while (n) {
        size_t part = n < 4096 ? n : 4096;
        memcpy(dst, src, part);
        s->crc = crc_by_table(s->crc, dst, part);
        s->copied += part;
        dst += part, src += part, n -= part;
    }
}

static uint32_t finish_by_table(struct stream *s) { return ~s->crc; }
