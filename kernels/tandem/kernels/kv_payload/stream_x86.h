/* Copying and summing with the carry-less multiplication of x86-64, 16 or 64 bytes at a time. */

#pragma once

#include <cpuid.h>
#include <immintrin.h>

#include "stream.h"

/* Folding with carry-less multiplication: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ"
   (Intel, 2009). A pair of constants moves 16 bytes by a distance: x^(8d+32) and x^(8d-32) mod P, reflected, times x. */

static const uint64_t BY_256[2] = {0x11542778a, 0x1322d1430};
static const uint64_t BY_64[2] = {0x154442bd4, 0x1c6e41596};
static const uint64_t BY_16[2] = {0x1751997d0, 0x0ccaa009e};

#define SSE_TARGET __attribute__((target("sse4.1,pclmul")))
#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,vpclmulqdq,pclmul,sse4.1")))

SSE_TARGET INLINE __m128i fold_128(__m128i a, __m128i by, __m128i next) {
    __m128i moved = _mm_xor_si128(_mm_clmulepi64_si128(a, by, 0x00), _mm_clmulepi64_si128(a, by, 0x11));
    return _mm_xor_si128(moved, next);
}

/* The rest after the last whole stripe, from one 16-byte accumulator. */
SSE_TARGET static uint32_t finish_128(__m128i acc, const uint8_t *rest, size_t n) {
    const __m128i by = _mm_loadu_si128((const __m128i *)BY_16);
    for (; n >= 16; rest += 16, n -= 16) acc = fold_128(acc, by, _mm_loadu_si128((const __m128i *)rest));
    uint8_t last[16];
    _mm_storeu_si128((__m128i *)last, acc);
    return ~crc_by_table(crc_by_table(0, last, 16), rest, n); /* the initial register is in the accumulator already */
}

typedef struct { __m128i a, b, c, d; } sse_state;

SSE_TARGET INLINE sse_state sse_load(const struct stream *s) {
    const __m128i *p = (const __m128i *)s->acc;
    return (sse_state){_mm_load_si128(p), _mm_load_si128(p + 1), _mm_load_si128(p + 2), _mm_load_si128(p + 3)};
}

SSE_TARGET INLINE sse_state sse_begin(const uint8_t *src) {
    const __m128i *p = (const __m128i *)src;
    const __m128i first = _mm_xor_si128(_mm_loadu_si128(p), _mm_cvtsi32_si128(-1));
    return (sse_state){first, _mm_loadu_si128(p + 1), _mm_loadu_si128(p + 2), _mm_loadu_si128(p + 3)};
}

SSE_TARGET INLINE sse_state sse_fold(sse_state state, enum target target, uint8_t *dst, const uint8_t *src) {
    const __m128i by = _mm_loadu_si128((const __m128i *)BY_64), *p = (const __m128i *)src;
    const __m128i a = _mm_loadu_si128(p), b = _mm_loadu_si128(p + 1);
    const __m128i c = _mm_loadu_si128(p + 2), d = _mm_loadu_si128(p + 3);
    __m128i *q = (__m128i *)dst;
    if (target == PAST_CACHE) {
        _mm_stream_si128(q, a), _mm_stream_si128(q + 1, b), _mm_stream_si128(q + 2, c), _mm_stream_si128(q + 3, d);
    } else if (target == CACHED) {
        _mm_storeu_si128(q, a), _mm_storeu_si128(q + 1, b), _mm_storeu_si128(q + 2, c), _mm_storeu_si128(q + 3, d);
    }
    return (sse_state){fold_128(state.a, by, a), fold_128(state.b, by, b), fold_128(state.c, by, c), fold_128(state.d, by, d)};
}

SSE_TARGET INLINE void sse_store(struct stream *s, sse_state state) {
    __m128i *p = (__m128i *)s->acc;
    _mm_store_si128(p, state.a), _mm_store_si128(p + 1, state.b);
    _mm_store_si128(p + 2, state.c), _mm_store_si128(p + 3, state.d);
}

DEFINE_ADVANCE(advance_sse, SSE_TARGET, 64, sse_state, sse_load, sse_begin, sse_fold, sse_store)

SSE_TARGET static uint32_t finish_sse(struct stream *s) {
    if (!s->has_begun) return ~crc_by_table(~0u, s->part, s->pending);
    const __m128i by = _mm_loadu_si128((const __m128i *)BY_16);
    const __m128i *a = (const __m128i *)s->acc;
    __m128i acc = _mm_load_si128(a);
    for (int i = 1; i < 4; i++) acc = fold_128(acc, by, _mm_load_si128(a + i));
    return finish_128(acc, s->part, s->pending);
}

typedef struct { __m512i a, b, c, d; } avx512_state;

AVX512_TARGET INLINE __m512i fold_512(__m512i a, __m512i by, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, by, 0x00), _mm512_clmulepi64_epi128(a, by, 0x11), next, 0x96);
}

AVX512_TARGET INLINE avx512_state avx512_load(const struct stream *s) {
    const __m512i *p = (const __m512i *)s->acc;
    return (avx512_state){_mm512_load_si512(p), _mm512_load_si512(p + 1), _mm512_load_si512(p + 2), _mm512_load_si512(p + 3)};
}

AVX512_TARGET INLINE avx512_state avx512_begin(const uint8_t *src) {
    const __m512i inverted = _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1));
    return (avx512_state){_mm512_xor_si512(_mm512_loadu_si512(src), inverted), _mm512_loadu_si512(src + 64),
                          _mm512_loadu_si512(src + 128), _mm512_loadu_si512(src + 192)};
}

AVX512_TARGET INLINE avx512_state avx512_fold(avx512_state state, enum target target, uint8_t *dst, const uint8_t *src) {
    const __m512i by = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)BY_256));
    const __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + 64);
    const __m512i c = _mm512_loadu_si512(src + 128), d = _mm512_loadu_si512(src + 192);
    if (target == PAST_CACHE) {
        __m512i *q = (__m512i *)dst;
        _mm512_stream_si512(q, a), _mm512_stream_si512(q + 1, b);
        _mm512_stream_si512(q + 2, c), _mm512_stream_si512(q + 3, d);
    } else if (target == CACHED) {
        _mm512_storeu_si512(dst, a), _mm512_storeu_si512(dst + 64, b);
        _mm512_storeu_si512(dst + 128, c), _mm512_storeu_si512(dst + 192, d);
    }
    return (avx512_state){fold_512(state.a, by, a), fold_512(state.b, by, b), fold_512(state.c, by, c), fold_512(state.d, by, d)};
}

AVX512_TARGET INLINE void avx512_store(struct stream *s, avx512_state state) {
    __m512i *p = (__m512i *)s->acc;
    _mm512_store_si512(p, state.a), _mm512_store_si512(p + 1, state.b);
    _mm512_store_si512(p + 2, state.c), _mm512_store_si512(p + 3, state.d);
}

DEFINE_ADVANCE(advance_avx512, AVX512_TARGET, 256, avx512_state, avx512_load, avx512_begin, avx512_fold, avx512_store)

AVX512_TARGET static uint32_t finish_avx512(struct stream *s) {
    if (!s->has_begun) return ~crc_by_table(~0u, s->part, s->pending);
    const __m512i by = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)BY_64));
    const __m512i *a = (const __m512i *)s->acc;
    __m512i one = _mm512_load_si512(a);
    for (int i = 1; i < 4; i++) one = fold_512(one, by, _mm512_load_si512(a + i));
    const uint8_t *rest = s->part;
    size_t n = s->pending;
    for (; n >= 64; rest += 64, n -= 64) one = fold_512(one, by, _mm512_loadu_si512(rest));
    __m128i lanes[4], acc, by_16 = _mm_loadu_si128((const __m128i *)BY_16);
    _mm512_storeu_si512(lanes, one);
    acc = lanes[0];
    for (int i = 1; i < 4; i++) acc = fold_128(acc, by_16, lanes[i]);
    return finish_128(acc, rest, n);
}
