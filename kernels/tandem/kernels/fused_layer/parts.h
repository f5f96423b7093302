/* The parts of a layer between its products; compiled once a set of vector instructions, see vectors.h. */

#include "../rms_norm/rows.h"
#include "../rope/rows.h"
#include "../silu_mul/rows.h"
#include "../quantized_linear/rows.h"
#include "../quantized_linear/columns.h"
#if ISA == 256
#include "../quantized_linear/many_rows.h"
#else
#include "../quantized_linear/amx.h"
#include "../quantized_linear/unpack.h"
#endif
#include "../paged_decode/attend.h"

/* x + first, rounded, + second, rounded. */
ENTRY void NAME(add_two)(char *x, const void *first, const void *second, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += LANES) {
        const VEC sum = NAME(as_bf16)(NAME(add)(NAME(load)(x, i, 1), NAME(load)(first, i, 1)));
        NAME(store)(x, i, 1, NAME(add)(sum, NAME(load)(second, i, 1)));
    }
}

ENTRY void NAME(add_row)(uint16_t *out, const uint16_t *x, const char *added, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += LANES)
        NAME(store)(out, i, 1, NAME(add)(NAME(load)(x, i, 1), NAME(load)(added, i, 1)));
}
