/* Conversion between dtypes and the wire codecs, one instance for each set of vector instructions. */

#pragma once

#include "path.h"

/* ---- conversion ----------------------------------------------------------------------------------------------------

   Everything goes through float32, which holds every value of the other types. Rounding is to nearest, ties to even. A
   NaN becomes the type's plain quiet NaN. */

enum dtype { F32 = 0, BF16 = 1, F16 = 2 };

INLINE float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

INLINE float load(enum dtype type, const uint8_t *p, size_t i) {
    if (type == F32) {
        float f;
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    if (type == BF16) return as_float((uint32_t)h << 16);
    const uint32_t magnitude = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t finite = as_bits(as_float(magnitude << 13) * 0x1p112f); /* exact, subnormals too */
    return as_float(sign | (magnitude >= 0x7c00u ? magnitude << 13 | 0x7f800000u : finite));
}

INLINE void store(enum dtype type, uint8_t *p, size_t i, float value) {
    const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
    if (type == F32) {
        const uint32_t out = magnitude > 0x7f800000u ? 0x7fc00000u : bits;
        memcpy(p + 4 * i, &out, 4);
        return;
    }
    uint16_t out;
    if (type == BF16) {
        const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        out = (uint16_t)(magnitude > 0x7f800000u ? 0x7fc0u : rounded);
    } else {
        /* Maratyszcza's fp16: two scalings push what overflows to infinity, an addition rounds at the right place. */
        const float base = as_float(magnitude) * 0x1p112f * 0x1p-110f;
        const uint32_t exponent = bits << 1 & 0xff000000u;
        const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
        const uint32_t sum = as_bits(as_float((bias >> 1) + 0x07800000u) + base);
        const uint32_t rounded = (sum >> 13 & 0x7c00u) + (sum & 0x0fffu);
        out = (uint16_t)(magnitude > 0x7f800000u ? 0x7e00u : (bits >> 16 & 0x8000u) | rounded);
    }
    memcpy(p + 2 * i, &out, 2);
}

INLINE void convert(enum dtype from, enum dtype to, const uint8_t *restrict src, uint8_t *restrict dst, size_t n) {
    for (size_t i = 0; i < n; i++) store(to, dst, i, load(from, src, i));
}

/* ---- codecs --------------------------------------------------------------------------------------------------------

   One float32 scale a row (one head of one plane of one layer of one block): the largest finite magnitude over the
   largest code. All scales come first, then all codes. */

enum codec { INT8 = 1, FP8 = 2 };

INLINE uint8_t fp8_of(float value) { /* |value| <= 448 or NaN; e4m3fn */
    const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xc407ffffu + (magnitude >> 20 & 1)) >> 20; /* exponent bias 127 -> 7 */
    const uint32_t subnormal = as_bits(as_float(magnitude) + as_float(141u << 23)) - (141u << 23);
    const uint32_t code = magnitude > 0x7f800000u ? 0x7fu : magnitude < 121u << 23 ? subnormal : normal;
    return (uint8_t)(code | (magnitude > 0x7f800000u ? 0 : bits >> 24 & 0x80u));
}

INLINE float fp8_to(uint8_t code) {
    const uint32_t magnitude = code & 0x7fu, sign = (uint32_t)(code & 0x80u) << 24;
    const uint32_t finite = as_bits(as_float(magnitude << 20) * 0x1p120f);
    return as_float(sign | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}

INLINE uint8_t int8_of(float value) { /* -128 stands for NaN */
    const float rounded = (value + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: to nearest, ties to even */
    return (uint8_t)(int8_t)(int32_t)(value != value ? -128.0f : rounded);
}

INLINE float int8_to(uint8_t code) { return code == 0x80u ? as_float(0x7fc00000u) : (float)(int8_t)code; }

INLINE void encode(enum codec codec, enum dtype from, const uint8_t *src, uint8_t *scales, uint8_t *codes, size_t rows,
                   size_t n) {
    const uint8_t *restrict in = src;
    uint8_t *restrict out = codes;
    const float most = codec == INT8 ? 127.0f : 448.0f;
    for (size_t r = 0; r < rows; r++) {
        int32_t amax = 0;
        for (size_t i = 0; i < n; i++) {
            const int32_t magnitude = (int32_t)(as_bits(load(from, in, r * n + i)) & 0x7fffffffu);
            const int32_t finite = magnitude & -(int32_t)(magnitude < 0x7f800000);
            amax = finite > amax ? finite : amax;
        }
        const float scale = as_float((uint32_t)amax) / most, divisor = scale == 0.0f ? 1.0f : scale;
        memcpy(scales + 4 * r, &scale, 4);
        for (size_t i = 0; i < n; i++) {
            float value = load(from, in, r * n + i) / divisor;
            value = value > most ? most : value < -most ? -most : value;
            out[r * n + i] = codec == INT8 ? int8_of(value) : fp8_of(value);
        }
    }
}

INLINE void decode(enum codec codec, enum dtype to, const uint8_t *scales, const uint8_t *codes, uint8_t *dst, size_t rows,
                   size_t n) {
    const uint8_t *restrict in = codes;
    uint8_t *restrict out = dst;
    for (size_t r = 0; r < rows; r++) {
        float scale;
        memcpy(&scale, scales + 4 * r, 4);
        for (size_t i = 0; i < n; i++) {
            const uint8_t code = in[r * n + i];
            store(to, out, r * n + i, (codec == INT8 ? int8_to(code) : fp8_to(code)) * scale);
        }
    }
}

/* One instance of everything for each set of vector instructions. */

#define DEFINE_WIRE(SUFFIX, TARGET)                                                                                    \
    TARGET static void convert_##SUFFIX(int from, int to, const uint8_t *src, uint8_t *dst, size_t n) {                \
        switch (from * 3 + to) {                                                                                       \
        case F32 * 3 + F32: convert(F32, F32, src, dst, n); break;                                                     \
        case F32 * 3 + BF16: convert(F32, BF16, src, dst, n); break;                                                   \
        case F32 * 3 + F16: convert(F32, F16, src, dst, n); break;                                                     \
        case BF16 * 3 + F32: convert(BF16, F32, src, dst, n); break;                                                   \
        case BF16 * 3 + BF16: convert(BF16, BF16, src, dst, n); break;                                                 \
        case BF16 * 3 + F16: convert(BF16, F16, src, dst, n); break;                                                   \
        case F16 * 3 + F32: convert(F16, F32, src, dst, n); break;                                                     \
        case F16 * 3 + BF16: convert(F16, BF16, src, dst, n); break;                                                   \
        case F16 * 3 + F16: convert(F16, F16, src, dst, n); break;                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void encode_##SUFFIX(int codec, int from, const uint8_t *src, uint8_t *s, uint8_t *c, size_t rows,   \
                                       size_t n) {                                                                     \
        switch (codec * 3 + from) {                                                                                    \
        case INT8 * 3 + F32: encode(INT8, F32, src, s, c, rows, n); break;                                             \
        case INT8 * 3 + BF16: encode(INT8, BF16, src, s, c, rows, n); break;                                           \
        case INT8 * 3 + F16: encode(INT8, F16, src, s, c, rows, n); break;                                             \
        case FP8 * 3 + F32: encode(FP8, F32, src, s, c, rows, n); break;                                               \
        case FP8 * 3 + BF16: encode(FP8, BF16, src, s, c, rows, n); break;                                             \
        case FP8 * 3 + F16: encode(FP8, F16, src, s, c, rows, n); break;                                               \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void decode_##SUFFIX(int codec, int to, const uint8_t *s, const uint8_t *c, uint8_t *dst, size_t rows, \
                                       size_t n) {                                                                     \
        switch (codec * 3 + to) {                                                                                      \
        case INT8 * 3 + F32: decode(INT8, F32, s, c, dst, rows, n); break;                                             \
        case INT8 * 3 + BF16: decode(INT8, BF16, s, c, dst, rows, n); break;                                           \
        case INT8 * 3 + F16: decode(INT8, F16, s, c, dst, rows, n); break;                                             \
        case FP8 * 3 + F32: decode(FP8, F32, s, c, dst, rows, n); break;                                               \
        case FP8 * 3 + BF16: decode(FP8, BF16, s, c, dst, rows, n); break;                                             \
        case FP8 * 3 + F16: decode(FP8, F16, s, c, dst, rows, n); break;                                               \
        }                                                                                                              \
    }

DEFINE_WIRE(baseline, )
#if defined(__x86_64__)
DEFINE_WIRE(avx2, __attribute__((target("avx2"))))
DEFINE_WIRE(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#define DISPATCH(NAME, ...)                                                                                            \
    (has_avx512 ? NAME##_avx512(__VA_ARGS__) : has_avx2 ? NAME##_avx2(__VA_ARGS__) : NAME##_baseline(__VA_ARGS__))
#else
#define DISPATCH(NAME, ...) NAME##_baseline(__VA_ARGS__)
#endif
