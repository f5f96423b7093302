/* All layers of a single row in one parallel region, attention to paged KV among them; see cpu.c.

   Threads meet seven times a layer: behind qkv, behind its rotation and its writing into the pool, behind their shares of
   attention, behind the merging of these, and as in `behind`. Each has the residual stream for itself. */

struct layer { const struct before *before; const struct behind *behind; char *pool; /* the first key of block 0, head 0 */ };

struct step {
    uint16_t *x; /* [width], written over */
    const char *cos, *sin;
    uint16_t *qkv;
    int64_t layers, slot; /* where in a layer's pool the row's key and value go: block · block_tokens + offset */
    struct decode decode; /* of a batch of one: q and out are the code's to set, the pool each layer's */
    /* From here on not the caller's. */
    const struct layer *layer;
    float eps;
    int64_t threads;
};

/* layers.py counts in numbers of 64 bits. */
_Static_assert(offsetof(struct step, slot) == 5 * 8 && offsetof(struct step, decode) == 6 * 8, "as in layers.py");
_Static_assert(offsetof(struct decode, table) == 3 * 8 && offsetof(struct decode, lens) == 4 * 8, "as in layers.py");
_Static_assert(offsetof(struct decode, max_blocks) == 12 * 8, "as in layers.py");
_Static_assert(offsetof(struct decode, scale) == 21 * 8, "layers.py gives what stands before it");

/* Turns queries and keys, and writes keys and values into the pool. */
static void turn_and_store(const struct step *s, const struct layer *layer) {
    const struct decode *d = &s->decode;
    struct turn turn = layer->before->turn;
    turn.x = (char *)s->qkv, turn.cos = s->cos, turn.sin = s->sin;
    turn_rows_avx512(&turn, 0, 1);
    const int64_t row_bytes = d->width * 2;
    const char *key = (const char *)s->qkv + d->kv_heads * d->group * row_bytes, *value = key + d->kv_heads * row_bytes;
    char *to = layer->pool + s->slot / d->block_tokens * d->block_bytes + s->slot % d->block_tokens * row_bytes;
    for (int64_t head = 0; head < d->kv_heads; head++, to += d->head_bytes) {
        memcpy(to, key + head * row_bytes, row_bytes);
        memcpy(to + d->plane_bytes, value + head * row_bytes, row_bytes);
    }
}

static void attend_to_layer(const struct step *s, const struct layer *layer, int64_t which, int64_t count) {
    struct decode d = s->decode;
    d.pool = layer->pool;
    const int64_t useful = count < d.threads ? count : d.threads;
    if (which < useful) decode_share(&d, which, useful);
    meet(count);
    if (which == 0) merge_parts(&d);
    meet(count);
}

ENTRY void add_row(uint16_t *out, const uint16_t *x, const char *added, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += 16)
        store_avx512(out, i, 1, add_avx512(load_avx512(x, i, 1), load_avx512(added, i, 1)));
}

static void run_step(void *data) {
    const struct step *s = data;
    const int64_t which = thread(s->threads), count = threads(s->threads), width = s->layer->before->norm.width;
    uint16_t x[width] __attribute__((aligned(64))), normed[width] __attribute__((aligned(64)));
    uint16_t gated[s->layer->behind->gates.width] __attribute__((aligned(64)));
    const char *added = NULL;
    memcpy(x, s->x, sizeof x);
    for (const struct layer *layer = s->layer; layer < s->layer + s->layers; layer++) {
        struct linear qkv = layer->before->qkv;
        const struct behind *b = layer->behind;
        struct norm norm = layer->before->norm;
        norm.x = (char *)x, norm.added = added, norm.out = (char *)normed;
        norm_rows_avx512(&norm, s->eps, 0, 1);
        if (qkv.kind == 0) qkv.plain.out = s->qkv;
        else qkv.quantized.out = (char *)s->qkv;
        linear_share(&qkv, normed, which, count);
        meet(count);
        if (which == 0) turn_and_store(s, layer);
        meet(count);
        attend_to_layer(s, layer, which, count);
        linear_share(&b->o, (const uint16_t *)s->decode.out, which, count);
        meet(count);
        norm = b->norm;
        norm.x = (char *)x, norm.added = linear_out(&b->o), norm.out = (char *)normed;
        norm_rows_avx512(&norm, s->eps, 0, 1);
        linear_share(&b->gate_up, normed, which, count);
        meet(count);
        struct gates gates = b->gates;
        gates.x = linear_out(&b->gate_up), gates.out = (char *)gated, gates.rows = 1, gates.is_bf16 = 1;
        gate_rows_avx512(&gates, 0, 1);
        linear_share(&b->down, gated, which, count);
        meet(count);
        added = linear_out(&b->down);
    }
    if (which == 0) add_row(s->x, x, added, width);
}
