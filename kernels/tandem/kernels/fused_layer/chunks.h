/* Layers of any number of rows with quantised weights in one parallel region: first those of sequences that decode, then chunks
   of prompts, whose attention is another library's code; see cpu.c and step.h.

   Each thread normalises, turns, stores and gates its own rows. Threads meet behind the quantising and behind the product of
   each of four, behind what is stored, and within attention. */

struct chunks {
    int64_t rows, first_layer;
    int64_t ends_attended; /* stops behind the last layer's attention, with x as it is before the rest of that layer */
    int64_t max_blocks;    /* of a row of the chunks' table */
    extend_check_fn *check;
    extend_share_fn *attend;
    struct room room;
    struct extend extend; /* without pool, queries, result and scale; no sequences = no chunks */
    /* From here on not the caller's. */
    struct step step;
};

/* layers.py counts in numbers of 64 bits. */
_Static_assert(offsetof(struct chunks, extend) == 8 * 8 && offsetof(struct extend, scale) == 22 * 8, "as in layers.py");
_Static_assert(offsetof(struct extend, room) == 7 * 8 && offsetof(struct extend, sequences) == 8 * 8, "as in layers.py");

static void run_chunks(void *data) {
    struct chunks *c = data;
    const struct step *s = &c->step;
    const int64_t which = thread(s->threads), count = threads(s->threads), rows = c->rows, width = s->layer->pre_attention->norm.width;
    const int64_t first = rows * which / count, last = rows * (which + 1) / count;
    const char *added = NULL;
    for (int64_t at = 0; at < s->layers; at++) {
        const struct layer *layer = s->layer + at;
        struct norm norm = layer->pre_attention->norm;
        norm.x = (char *)s->x, norm.added = added, norm.out = s->added; /* a row is added before it is written over */
        norm_rows(&norm, s->eps, first, last);
        many_rows_share(&layer->pre_attention->qkv, (const uint16_t *)s->added, s->qkv, rows, width, &c->room, 0, which, count);
        turn_and_store(s, layer, first, last);
        if (which == 0) {
            struct extend *e = &c->extend;
            e->q = (const uint16_t *)s->qkv + s->decode.batch * s->decode.q_stride;
            e->out = (uint16_t *)s->decode.out + s->decode.batch * layer->post_attention->mixed_width;
            e->pool = layer->pool, e->sequence = -1;
        }
        barrier(count);
        if (s->decode.batch) attend_to_layer(s, layer, which, count);
        if (c->extend.sequences) c->attend(&c->extend, which, count);
        added = NULL;
        if (c->ends_attended && at == s->layers - 1) break;
        many_behind_share(layer->post_attention, (char *)s->x, (const uint16_t *)s->decode.out, s->added, s->gate_up, rows, &c->room,
                          s->eps, which, count);
        added = s->added;
    }
    if (added) add_row(s->x + first * width, s->x + first * width, added + first * width * 2, (last - first) * width);
}
