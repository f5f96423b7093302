/* Decode attention over head-major blocks on the CPU: keys and values are read once, where they lie.

   All tokens of all (sequence, KV head) pairs are laid end to end and split equally among the threads:

       ├─ sequence 0, head 0 ─┼─ sequence 0, head 1 ─┼─ sequence 1, head 0 ─┤
       ├─ thread 0 ──────────────────┼─ thread 1 ───────────────────────────┤

   A pair that is cut leaves a part with each thread; the parts are merged when all have ended (Flash-Decoding). Shapes
   and types are the caller's to check, blocks and lengths are checked here. One parallel region a call; thread-safe. */

#include "../instructions.h"
#include "../parallel.h"
#include "decode.h"
#include "work_split.h"

#define CODE "paged_decode/attend.h"
#include "../both_isas.h"

/* For tests and at the start: the instructions by name, "" = the best; 0 if this CPU has not got them. */
int tandem_choose_path(const char *name) {
    const int chosen = choose_instructions(name, AVX512);
#if defined(__x86_64__)
    if (chosen == AVX512) attend = attend_avx512, finish = finish_avx512;
    if (chosen == AVX2) attend = attend_avx2, finish = finish_avx2;
#endif
    return chosen;
}

static void share_out(void *data) {
    const struct decode *d = data;
    decode_share(d, thread(d->threads), threads(d->threads));
}

/* `given` are the fields of `struct decode` up to `threads`, each of 8 bytes. Answers with an `enum answer`. */
int tandem_paged_decode(const int64_t *given, float scale) {
    struct decode d;
    memset(&d, 0, sizeof d);
    memcpy(&d, given, offsetof(struct decode, scale));
    d.scale = scale;
    const enum answer answer = open_decode(&d);
    if (answer != DONE) return answer;
    const size_t row_bytes = d.kv_heads * d.group * d.width * (d.q_is_bf16 ? 2 : 4);
    for (int64_t sequence = 0; sequence < d.batch; sequence++)
        if (!d.lens[sequence]) memset(d.out + sequence * row_bytes, 0, row_bytes);
    run_region(share_out, &d, d.threads);
    merge_parts(&d);
    close_decode(&d);
    return DONE;
}
