/* Rows [first, last); compiled once a set of vector instructions, see vectors.h. silu is rounded to the type before it is
   multiplied, as in torch. */

FN VEC NAME(silu)(VEC x) {
    return NAME(divide)(x, NAME(add)(NAME(all)(1.0f), NAME(exp)(NAME(mul)(x, NAME(all)(-1.0f)))));
}

/* The same within 1e-5 of it, relatively, which rounding to bfloat16 hides, by a reciprocal that Newton's method corrects. */
#if ISA == 512
FN VEC NAME(silu_for_bf16)(VEC x) {
    const VEC y = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
    const VEC below = _mm512_add_ps(_mm512_set1_ps(1.0f), NAME(power_of_two)(y)), near = _mm512_rcp14_ps(below);
    return _mm512_mul_ps(x, _mm512_mul_ps(near, _mm512_fnmadd_ps(below, near, _mm512_set1_ps(2.0f))));
}
#else
FN VEC NAME(silu_for_bf16)(VEC x) { return NAME(silu)(x); }
#endif

FN void NAME(gate_row)(const struct gates *g, int64_t row, const int is_bf16) {
    const int64_t gate = row * 2 * g->width, up = gate + g->width;
    for (int64_t i = 0; i < g->width; i += LANES) {
        const VEC x = NAME(load)(g->x, gate + i, is_bf16);
        const VEC silu = is_bf16 ? NAME(as_bf16)(NAME(silu_for_bf16)(x)) : NAME(silu)(x);
        NAME(store)(g->out, row * g->out_stride + i, is_bf16, NAME(mul)(silu, NAME(load)(g->x, up + i, is_bf16)));
    }
}

ENTRY void NAME(gate_rows)(const struct gates *g, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (g->is_bf16) NAME(gate_row)(g, row, 1);
        else NAME(gate_row)(g, row, 0);
}
