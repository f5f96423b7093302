/* One row of `width` numbers, a multiple of 16; compiled once a set of vector instructions, see vectors.h. */

ENTRY void NAME(write_row)(const struct store *s, const char *from, char *to) {
    if (s->from_bf16 == s->to_bf16) memcpy(to, from, s->width * (s->to_bf16 ? 2 : 4));
    else if (s->to_bf16)
        for (int64_t i = 0; i < s->width; i += LANES) NAME(store)(to, i, 1, NAME(load)(from, i, 0));
    else
        for (int64_t i = 0; i < s->width; i += LANES) NAME(store)(to, i, 0, NAME(load)(from, i, 1));
}
