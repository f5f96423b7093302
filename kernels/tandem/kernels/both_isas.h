/* CODE, a header named from here, compiled for both sets of vector instructions; see vectors.h. */

#if defined(__x86_64__)
#define ISA 512
#include "vectors.h"
#include CODE
#undef ISA
#define ISA 256
#include "vectors.h"
#include CODE
#undef ISA
#endif
#undef CODE
