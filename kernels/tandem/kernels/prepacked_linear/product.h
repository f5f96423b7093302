/* The product of few rows and a packed weight, one instance for each set of instructions; see cpu.c. */

#pragma once

#include "../instructions.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct product {
    const uint16_t *x, *weight, *bias; /* bias may be NULL */
    uint16_t *out;
    int64_t rows, inner, columns;
    int64_t x_stride;             /* from row to row, in numbers; out is contiguous */
    int64_t block, block_numbers; /* columns of a block; numbers from one to the next */
    float *wide;                  /* with AVX2: room for many rows in float32, or NULL; see columns_avx2.h */
    int64_t threads;
};

typedef void columns_fn(const struct product *, int64_t first, int64_t last);
static columns_fn *columns;
static columns_fn *tiled_columns; /* for more rows than one; NULL without a matrix unit */

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET "avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"

#define FN static inline __attribute__((always_inline, target(TARGET)))
#define ENTRY static __attribute__((target(TARGET)))
#define NAME(x) x##_avx512
FN __m512 NAME(add_pairs)(__m512 sum, __m512i weight, int32_t pair) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000), both = _mm512_set1_epi32(pair);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, high));
    sum = _mm512_fmadd_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(weight, 16)), sum);
    return _mm512_fmadd_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(weight, high)), sum);
}
#include "columns.h"
#undef FN
#undef ENTRY
#undef NAME

#define FN static inline __attribute__((always_inline, target(TARGET ",avx512bf16")))
#define ENTRY static __attribute__((target(TARGET ",avx512bf16")))
#define NAME(x) x##_bf16
/* As text: from the intrinsic GCC makes copies of the sum before and after. */
FN __m512 NAME(add_pairs)(__m512 sum, __m512i weight, int32_t pair) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(_mm512_set1_epi32(pair)), "v"(weight));
    return sum;
}
#include "columns.h"

#undef FN
#undef ENTRY
#undef NAME
#undef TARGET

#include "columns_avx2.h"

#endif

/* The columns that one of `count` threads computes. */
static void product_share(const struct product *p, int64_t which, int64_t count) {
    const int64_t vectors = p->columns / 16;
    columns_fn *run = tiled_columns && p->rows > 1 && p->inner % 32 == 0 ? tiled_columns : columns;
    run(p, vectors * which / count * 16, vectors * (which + 1) / count * 16);
}

/* Chooses the instructions by name, "" = the best, and answers which they are; 0 if this CPU has not got them. */
static int choose_product(const char *name) {
    const int chosen = choose_instructions(name, AVX512_BF16);
    columns = NULL;
#if defined(__x86_64__)
    if (chosen == AVX512_BF16) columns = columns_bf16;
    if (chosen == AVX512) columns = columns_avx512;
    if (chosen == AVX2) columns = columns_avx2;
#endif
    return columns ? chosen : NONE;
}
