/* Prefill attention on the CPU in bfloat16 (FlashAttention-2, section 3.1), on the matrix unit where a core has one; with
   AVX2, in float32.

   One sequence after the other: its keys and values are packed once, by parts, then multiplied with tiles of queries, the
   heads of a GQA group side by side. Threads take the next part and the next tile when they are done with one: later
   tiles take longer. Scores and sums are float32; weights are rounded for the second product, except with AVX2. Shapes and
   types are the caller's to check; rows, blocks and lengths are checked here. One parallel region a call; thread-safe. */

#include "../instructions.h"
#include "../matrix_unit.h"
#include "../parallel.h"
#include "products.h"

#if defined(__x86_64__)
#define ISA 512
#include "../vectors.h"
#undef FN
#undef ENTRY
#define TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,prefer-vector-width=512"
#define FN static inline __attribute__((always_inline, target(TARGET)))
#define ENTRY static __attribute__((target(TARGET)))
#include "tile.h"
#undef ISA
#define ISA 256
#include "../vectors.h"
#include "tile_avx2.h"
#endif

static product_fn *product;
static int uses_amx, uses_avx2;
enum answer { DONE, SHORT, OUTSIDE, NO_ROWS };

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. The answer is 1 for
   AVX512-BF16, 2 with AMX, 3 for AVX2, which AVX-512 without bfloat16 uses by its name alone. */
int tandem_choose_path(const char *name) {
    product = NULL, uses_amx = 0;
#if defined(__x86_64__)
    const int has = choose_instructions("", AVX512_BF16);
    uses_avx2 = has == AVX2 ? !*name || !strcmp(name, "avx2") : has && !strcmp(name, "avx2");
    if (uses_avx2) return 3;
    if (has != AVX512_BF16) return 0;
    uses_amx = (!*name || !strcmp(name, "amx")) && may_use_amx();
    if (uses_amx) product = product_amx;
    else if (!*name || !strcmp(name, "avx512bf16")) product = product_vectors;
#endif
    return product ? 1 + uses_amx : 0;
}

/* The first key that one of a sequence's queries may see. */
static int64_t oldest_of(const struct extend *e, int64_t sequence) {
    const int64_t first = e->lens[sequence] - (e->starts[sequence + 1] - e->starts[sequence]);
    return e->window && first >= e->window ? first - e->window + 1 : 0;
}

int tandem_extend_check(const struct extend *e, int64_t num_blocks, int64_t max_blocks, int64_t rows) {
    for (int64_t i = 0; i < e->sequences; i++) {
        const int64_t tokens = e->starts[i + 1] - e->starts[i], length = e->lens[i];
        if (tokens <= 0) continue;
        if (e->starts[i] < 0 || e->starts[i + 1] > rows) return NO_ROWS;
        if (length < tokens) return SHORT;
        const int64_t blocks = (length + e->block_tokens - 1) / e->block_tokens;
        if (blocks > max_blocks) return OUTSIDE;
        for (int64_t b = oldest_of(e, i) / e->block_tokens; b < blocks; b++)
            if ((uint64_t)e->table[i * e->table_stride + b] >= (uint64_t)num_blocks) return OUTSIDE;
    }
    return DONE;
}

/* The next sequence with queries, if there is one; one thread does this, and the others wait. */
static void go_on(struct extend *e) {
    do e->sequence++;
    while (e->sequence < e->sequences && e->starts[e->sequence + 1] <= e->starts[e->sequence]);
    if (e->sequence >= e->sequences) return;
    const int64_t tokens = e->starts[e->sequence + 1] - e->starts[e->sequence], length = e->lens[e->sequence];
    e->oldest = oldest_of(e, e->sequence);
    e->begin = e->oldest / STEP * STEP;
    e->padded = (length - e->begin + STEP - 1) / STEP * STEP;
    e->parts = e->kv_heads * (e->padded / STEP);
    const int64_t rows = uses_avx2 ? AVX2_ROWS : ROWS, numbers = e->kv_heads * e->padded * e->width;
    e->tiles = (tokens * e->group + rows - 1) / rows;
    e->keys = (uint16_t *)(((uintptr_t)e->room + 63) / 64 * 64);
    e->values = e->keys + (uses_avx2 ? 2 : 1) * numbers;
    e->next_part = e->next_tile = 0;
}

void tandem_extend_share(struct extend *e, int64_t which, int64_t count) {
#if defined(__x86_64__)
    if (uses_amx) open_amx();
    while (1) {
        if (which == 0) go_on(e);
        barrier(count);
        if (e->sequence >= e->sequences) break;
        for (int64_t i; (i = __atomic_fetch_add(&e->next_part, 1, __ATOMIC_RELAXED)) < e->parts;)
            if (uses_avx2) pack_part_avx2(e, i);
            else pack_part(e, i);
        barrier(count);
        for (int64_t i; (i = __atomic_fetch_add(&e->next_tile, 1, __ATOMIC_RELAXED)) < e->tiles * e->kv_heads;)
            if (uses_avx2) attend_tile_avx2(e, i);
            else attend_tile(e, i, product);
        barrier(count);
    }
    if (uses_amx) close_amx();
#endif
}

static void share_out(void *data) {
    struct extend *e = data;
    tandem_extend_share(e, thread(e->threads), threads(e->threads));
}

/* `given`: blocks of the pool and of a row of the table, rows of q, and the fields of `struct extend` up to `softcap`, each
   of 8 bytes. Answers with an `enum answer`. */
int tandem_extend_attention(const int64_t *given, float scale) {
    struct extend e;
    memset(&e, 0, sizeof e);
    memcpy(&e, given + 3, offsetof(struct extend, scale));
    e.scale = scale, e.sequence = -1;
    const int answer = tandem_extend_check(&e, given[0], given[1], given[2]);
    if (answer == DONE) run_region(share_out, &e, e.threads);
    return answer;
}
