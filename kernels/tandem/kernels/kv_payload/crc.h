/* CRC-32 by tables. */

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* IEEE 802.3, reflected, as zlib's crc32: eight bytes a step. */

static uint32_t crc_table[8][256];

__attribute__((constructor)) static void make_crc_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[0][n] = c;
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int k = 1; k < 8; k++) crc_table[k][n] = crc_table[0][crc_table[k - 1][n] & 255] ^ (crc_table[k - 1][n] >> 8);
}

/* `c` is the register: the inverted CRC. */
static uint32_t crc_by_table(uint32_t c, const uint8_t *p, size_t n) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; n >= 8; p += 8, n -= 8) {
        uint32_t lo, hi;
        memcpy(&lo, p, 4);
        memcpy(&hi, p + 4, 4);
        lo ^= c;
        c = crc_table[7][lo & 255] ^ crc_table[6][lo >> 8 & 255] ^ crc_table[5][lo >> 16 & 255] ^ crc_table[4][lo >> 24] ^
            crc_table[3][hi & 255] ^ crc_table[2][hi >> 8 & 255] ^ crc_table[1][hi >> 16 & 255] ^ crc_table[0][hi >> 24];
    }
#endif
    while (n--) c = crc_table[0][(c ^ *p++) & 255] ^ (c >> 8);
    return c;
}
