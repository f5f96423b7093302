/* All layers of few rows, each the last token of a sequence, in one parallel region, attention to paged KV among them; see
   cpu.c.

   For a single row there are seven barriers a layer: behind qkv, behind its rotation and its writing into the pool, behind
   the threads' shares of attention, behind the merging of these, and as in `behind`. Each thread has the residual stream for
   itself. For several rows each thread normalises, turns, stores and gates its own, with barriers behind that,
   too: ten. */

struct layer { const struct pre_attention *pre_attention; const struct post_attention *post_attention; char *pool; /* the first key of block 0, head 0 */ };

struct step {
    uint16_t *x; /* [rows][width], written over */
    const char *cos, *sin;
    int64_t table_stride;                /* of cos and sin, from row to row, in numbers */
    const int64_t *slots;                /* where in a layer's pool each row's key and value go: block · block_tokens + offset */
    char *qkv, *o_out, *gate_up, *added; /* room for so many rows; of a single one that of its layer is taken, but qkv */
    char *blocks; /* as in `struct quantized`, or NULL */
    int64_t layers;
    struct decode decode; /* of all rows; the pool is each layer's */
    /* From here on not the caller's. */
    const struct layer *layer;
    float eps;
    int64_t threads;
};

/* layers.py counts in numbers of 64 bits. */
_Static_assert(offsetof(struct step, slots) == 4 * 8 && offsetof(struct step, decode) == 11 * 8, "as in layers.py");
_Static_assert(offsetof(struct decode, table) == 3 * 8 && offsetof(struct decode, lens) == 4 * 8, "as in layers.py");
_Static_assert(offsetof(struct decode, batch) == 6 * 8 && offsetof(struct decode, max_blocks) == 12 * 8, "as in layers.py");
_Static_assert(offsetof(struct decode, table_stride) == 14 * 8, "as in layers.py");
_Static_assert(offsetof(struct decode, scale) == 21 * 8, "layers.py gives what stands before it");

/* Turns queries and keys of rows [first, last), and writes keys and values into the pool. */
static void turn_and_store(const struct step *s, const struct layer *layer, int64_t first, int64_t last) {
    const struct decode *d = &s->decode;
    struct rope_args turn = layer->pre_attention->turn;
    turn.x = s->qkv, turn.cos = s->cos, turn.sin = s->sin, turn.table_stride = s->table_stride;
    turn_rows(&turn, first, last);
    const int64_t head_bytes = d->width * 2, row_bytes = d->q_stride * 2;
    for (int64_t row = first; row < last; row++) {
        const int64_t slot = s->slots[row];
        const char *key = s->qkv + row * row_bytes + d->kv_heads * d->group * head_bytes, *value = key + d->kv_heads * head_bytes;
        char *to = layer->pool + slot / d->block_tokens * d->block_bytes + slot % d->block_tokens * head_bytes;
        for (int64_t head = 0; head < d->kv_heads; head++, to += d->head_bytes) {
            memcpy(to, key + head * head_bytes, head_bytes);
            memcpy(to + d->plane_bytes, value + head * head_bytes, head_bytes);
        }
    }
}

static void attend_to_layer(const struct step *s, const struct layer *layer, int64_t which, int64_t count) {
    struct decode d = s->decode;
    d.pool = layer->pool;
    const int64_t useful = count < d.threads ? count : d.threads;
    if (which < useful) decode_share(&d, which, useful);
    barrier(count);
    if (which == 0) merge_parts(&d);
    barrier(count);
}

static void run_step(void *data) {
    const struct step *s = data;
    const int64_t which = thread(s->threads), count = threads(s->threads), width = s->layer->pre_attention->norm.width;
    uint16_t x[width] __attribute__((aligned(64))), normed[width] __attribute__((aligned(64)));
    uint16_t gated[s->layer->post_attention->gates.width] __attribute__((aligned(64)));
    const char *added = NULL;
    memcpy(x, s->x, sizeof x);
    for (const struct layer *layer = s->layer; layer < s->layer + s->layers; layer++) {
        const struct post_attention *b = layer->post_attention;
        struct norm norm = layer->pre_attention->norm;
        norm.x = (char *)x, norm.added = added, norm.out = (char *)normed;
        norm_rows(&norm, s->eps, 0, 1);
        rows_share(&layer->pre_attention->qkv, normed, s->qkv, 1, 0, NULL, which, count);
        barrier(count);
        if (which == 0) turn_and_store(s, layer, 0, 1);
        barrier(count);
        attend_to_layer(s, layer, which, count);
        linear_share(&b->o, (const uint16_t *)s->decode.out, which, count);
        barrier(count);
        norm = b->norm;
        norm.x = (char *)x, norm.added = linear_out(&b->o), norm.out = (char *)normed;
        norm_rows(&norm, s->eps, 0, 1);
        linear_share(&b->gate_up, normed, which, count);
        barrier(count);
        struct gates gates = b->gates;
        gates.x = linear_out(&b->gate_up), gates.out = (char *)gated, gates.rows = 1, gates.is_bf16 = 1;
        gate_rows(&gates, 0, 1);
        linear_share(&b->down, gated, which, count);
        barrier(count);
        added = linear_out(&b->down);
    }
    if (which == 0) add_row(s->x, x, added, width);
}

static void run_rows_step(void *data) {
    const struct step *s = data;
    const struct decode *d = &s->decode;
    const int64_t which = thread(s->threads), count = threads(s->threads), rows = d->batch, width = s->layer->pre_attention->norm.width;
    const int64_t first = rows * which / count, last = rows * (which + 1) / count, inner = s->layer->post_attention->gates.width;
    const uint16_t *mixed = (const uint16_t *)d->out;
    const char *added = NULL;
    for (const struct layer *layer = s->layer; layer < s->layer + s->layers; layer++) {
        const struct post_attention *b = layer->post_attention;
        struct norm norm = layer->pre_attention->norm;
        norm.x = (char *)s->x, norm.added = added, norm.out = s->added; /* a row is added before it is written over */
        norm_rows(&norm, s->eps, first, last);
        barrier(count);
        rows_share(&layer->pre_attention->qkv, (const uint16_t *)s->added, s->qkv, rows, width, s->blocks, which, count);
        barrier(count);
        turn_and_store(s, layer, first, last);
        barrier(count);
        attend_to_layer(s, layer, which, count);
        rows_share(&b->o, mixed, s->o_out, rows, b->mixed_width, s->blocks, which, count);
        barrier(count);
        norm = b->norm;
        norm.x = (char *)s->x, norm.added = s->o_out, norm.out = s->o_out;
        norm_rows(&norm, s->eps, first, last);
        barrier(count);
        rows_share(&b->gate_up, (const uint16_t *)s->o_out, s->gate_up, rows, width, s->blocks, which, count);
        barrier(count);
        const struct gates gates = {
            .x = s->gate_up, .out = s->gate_up, .rows = rows, .width = inner, .out_stride = 2 * inner, .is_bf16 = 1};
        gate_rows(&gates, first, last);
        barrier(count);
        rows_share(&b->down, (const uint16_t *)s->gate_up, s->added, rows, 2 * inner, s->blocks, which, count);
        barrier(count);
        added = s->added;
    }
    add_row(s->x + first * width, s->x + first * width, s->added + first * width * 2, (last - first) * width);
}
