/* Writes keys and values of new tokens into their slots of a paged layer view, on the CPU. Shapes and types are the
   caller's to check; slots are checked here, before anything is written. Thread-safe; no parallel region: the bytes are
   few, and in the cache. */

#include "../instructions.h"

#include <stdint.h>
#include <string.h>

struct store {
    const char *k, *v;
    char *pool; /* the first key of block 0, head 0 */
    const int64_t *slots;
    int64_t tokens, heads, width, block_tokens, num_blocks;
    int64_t k_stride, v_stride; /* from token to token, in numbers */
    int64_t block_bytes, plane_bytes, head_bytes;
    int64_t from_bf16, to_bf16; /* or float32 */
};

#define CODE "kv_store/row.h"
#include "../both_isas.h"

typedef void row_fn(const struct store *, const char *from, char *to);
static row_fn *write_row;

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_instructions(name, AVX512);
#if defined(__x86_64__)
    if (chosen == AVX512) write_row = write_row_avx512;
    if (chosen == AVX2) write_row = write_row_avx2;
#endif
    return chosen;
}

/* `given` is a `struct store`; nothing else is looked at. 1 if a slot is outside the pool. */
int tandem_kv_store(const struct store *given, float unused) {
    const struct store s = *given;
    const int64_t row_bytes = s.width * (s.to_bf16 ? 2 : 4), number = s.from_bf16 ? 2 : 4;
    (void)unused;
    for (int64_t t = 0; t < s.tokens; t++)
        if (s.slots[t] < -1 || s.slots[t] >= s.num_blocks * s.block_tokens) return 1;
    for (int64_t t = 0; t < s.tokens; t++) {
        const int64_t slot = s.slots[t];
        if (slot < 0) continue;
        char *to = s.pool + slot / s.block_tokens * s.block_bytes + slot % s.block_tokens * row_bytes;
        for (int64_t head = 0; head < s.heads; head++, to += s.head_bytes) {
            write_row(&s, s.k + (t * s.k_stride + head * s.width) * number, to);
            write_row(&s, s.v + (t * s.v_stride + head * s.width) * number, to + s.plane_bytes);
        }
    }
    return 0;
}
