/* Rows [first, last); compiled once a set of vector instructions, see vectors.h. silu is rounded to the type before it is
   multiplied, as in torch. */

FN void NAME(gate_row)(const struct gates *g, int64_t row, const int is_bf16) {
    const int64_t gate = row * 2 * g->width, up = gate + g->width;
    for (int64_t i = 0; i < g->width; i += LANES) {
        const VEC x = NAME(load)(g->x, gate + i, is_bf16);
        const VEC below = NAME(add)(NAME(all)(1.0f), NAME(exp)(NAME(mul)(x, NAME(all)(-1.0f))));
        VEC silu = NAME(divide)(x, below);
        if (is_bf16) silu = NAME(as_bf16)(silu);
        NAME(store)(g->out, row * g->width + i, is_bf16, NAME(mul)(silu, NAME(load)(g->x, up + i, is_bf16)));
    }
}

ENTRY void NAME(gate_rows)(const struct gates *g, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (g->is_bf16) NAME(gate_row)(g, row, 1);
        else NAME(gate_row)(g, row, 0);
}
