/* Vectors of float32 for code that is compiled once an instruction set: include with ISA 512 or 256, any number of times,
   then that code.

   FN marks its functions, NAME(x) names them apart. bfloat16 is the upper half of a float32; rounding is to nearest, ties
   to even. Every vector has LANES numbers. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#undef FN
#undef NAME
#undef LANES
#undef VEC
#undef ENTRY

#if ISA == 512
#define NAME(x) x##_avx512
#define FN static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define ENTRY static __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")))
#define LANES 16
#define VEC __m512
#else
#define NAME(x) x##_avx2
#define FN static inline __attribute__((always_inline, target("avx2,fma")))
#define ENTRY static __attribute__((target("avx2,fma")))
#define LANES 8
#define VEC __m256
#endif

#if !(ISA == 512 ? HAS_VECTORS_512 : HAS_VECTORS_256)
#if ISA == 512
#define HAS_VECTORS_512 1

FN VEC NAME(zero)(void) { return _mm512_setzero_ps(); }
FN VEC NAME(all)(float x) { return _mm512_set1_ps(x); }
FN VEC NAME(add)(VEC a, VEC b) { return _mm512_add_ps(a, b); }
FN VEC NAME(mul)(VEC a, VEC b) { return _mm512_mul_ps(a, b); }
FN VEC NAME(divide)(VEC a, VEC b) { return _mm512_div_ps(a, b); }
FN VEC NAME(fma)(VEC a, VEC b, VEC c) { return _mm512_fmadd_ps(a, b, c); }
FN VEC NAME(most)(VEC a, VEC b) { return _mm512_max_ps(a, b); }
FN VEC NAME(least)(VEC a, VEC b) { return _mm512_min_ps(a, b); }
FN VEC NAME(whole)(VEC a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FN VEC NAME(times_power)(VEC a, VEC n) { return _mm512_scalef_ps(a, n); }
FN VEC NAME(load_f32)(const float *p) { return _mm512_loadu_ps(p); }
FN void NAME(store_f32)(float *p, VEC a) { _mm512_storeu_ps(p, a); }
FN VEC NAME(load_bf16)(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
FN __m512i NAME(bf16_bits)(VEC a) {
    const __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}
/* As text, for the target above has no such instruction. */
FN __m256i NAME(rounded)(VEC a) {
    if (!rounds_in_one) return _mm512_cvtepi32_epi16(NAME(bf16_bits)(a));
    __m256i bits;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(a));
    return bits;
}
FN void NAME(store_bf16)(uint16_t *p, VEC a) { _mm256_storeu_si256((void *)p, NAME(rounded)(a)); }
FN VEC NAME(as_bf16)(VEC a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(NAME(rounded)(a)), 16)); }
/* 2^a within 3e-6 of it, relatively, where it is rounded to bfloat16 next; NaN stays NaN. By a polynomial for what a is above
   a whole number. */
FN VEC NAME(power_of_two)(VEC a) {
    const VEC above = _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    VEC p = _mm512_set1_ps(1.3520603197e-2f);
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(5.2037428775e-2f));
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(2.4142749325e-1f));
    p = _mm512_fmadd_ps(p, above, _mm512_set1_ps(6.9300662066e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, above, _mm512_set1_ps(1.0000025181f)), a);
}
FN __m256 NAME(half)(VEC a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }

#else
#define HAS_VECTORS_256 1

FN VEC NAME(zero)(void) { return _mm256_setzero_ps(); }
FN VEC NAME(all)(float x) { return _mm256_set1_ps(x); }
FN VEC NAME(add)(VEC a, VEC b) { return _mm256_add_ps(a, b); }
FN VEC NAME(mul)(VEC a, VEC b) { return _mm256_mul_ps(a, b); }
FN VEC NAME(divide)(VEC a, VEC b) { return _mm256_div_ps(a, b); }
FN VEC NAME(fma)(VEC a, VEC b, VEC c) { return _mm256_fmadd_ps(a, b, c); }
FN VEC NAME(most)(VEC a, VEC b) { return _mm256_max_ps(a, b); }
FN VEC NAME(least)(VEC a, VEC b) { return _mm256_min_ps(a, b); }
FN VEC NAME(whole)(VEC a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FN VEC NAME(times_power)(VEC a, VEC n) { /* n whole, from -126 to 127 */
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(power));
}
FN VEC NAME(load_f32)(const float *p) { return _mm256_loadu_ps(p); }
FN void NAME(store_f32)(float *p, VEC a) { _mm256_storeu_ps(p, a); }
FN VEC NAME(load_bf16)(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
FN __m256i NAME(bf16_bits)(VEC a) {
    const __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
}
FN void NAME(store_bf16)(uint16_t *p, VEC a) {
    const __m256i bits = NAME(bf16_bits)(a), packed = _mm256_packus_epi32(bits, bits);
    _mm_storeu_si128((void *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
FN VEC NAME(as_bf16)(VEC a) { return _mm256_castsi256_ps(_mm256_slli_epi32(NAME(bf16_bits)(a), 16)); }
FN __m256 NAME(half)(VEC a) { return a; }

#endif

/* LANES numbers from a place that counts in numbers of a type: float32, or bfloat16 where `is_bf16`. */
FN VEC NAME(load)(const void *p, int64_t i, int is_bf16) {
    return is_bf16 ? NAME(load_bf16)((const uint16_t *)p + i) : NAME(load_f32)((const float *)p + i);
}
FN void NAME(store)(void *p, int64_t i, int is_bf16, VEC a) {
    if (is_bf16) NAME(store_bf16)((uint16_t *)p + i, a);
    else NAME(store_f32)((float *)p + i, a);
}

/* The sums of four vectors. */
FN __m128 NAME(sums)(VEC a, VEC b, VEC c, VEC d) {
    const __m256 ab = _mm256_hadd_ps(NAME(half)(a), NAME(half)(b)), cd = _mm256_hadd_ps(NAME(half)(c), NAME(half)(d));
    const __m256 abcd = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}
FN float NAME(sum)(VEC a) { return _mm_cvtss_f32(NAME(sums)(a, a, a, a)); }

/* exp(a), within 2e-7 of it, relatively; below -87 and above 88, where float32 ends, that of
   those. Cody and Waite's reduction. */
FN VEC NAME(exp)(VEC a) {
    const VEC x = NAME(least)(NAME(all)(88.0f), NAME(most)(NAME(all)(-87.0f), a)); /* in this order NaN stays NaN */
    const VEC n = NAME(whole)(NAME(mul)(x, NAME(all)(1.44269504f)));
    VEC r = NAME(fma)(n, NAME(all)(-0.693359375f), x);
    r = NAME(fma)(n, NAME(all)(2.12194440e-4f), r);
    VEC p = NAME(all)(1.9875691500e-4f);
    p = NAME(fma)(p, r, NAME(all)(1.3981999507e-3f));
    p = NAME(fma)(p, r, NAME(all)(8.3334519073e-3f));
    p = NAME(fma)(p, r, NAME(all)(4.1665795894e-2f));
    p = NAME(fma)(p, r, NAME(all)(1.6666665459e-1f));
    p = NAME(fma)(p, r, NAME(all)(5.0000001201e-1f));
    p = NAME(fma)(p, NAME(mul)(r, r), NAME(add)(r, NAME(all)(1.0f)));
    return NAME(times_power)(p, n);
}

#endif
