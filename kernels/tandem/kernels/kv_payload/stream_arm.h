/* Copying and summing with the CRC instructions of ARMv8. */

#pragma once

#include <arm_acle.h>
#include <sys/auxv.h>

#include "stream.h"

#define ARM_TARGET __attribute__((target("+crc")))

ARM_TARGET static void advance_arm(struct stream *s, uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next) {
    (void)next;
    while (n) {
        size_t part = n < 4096 ? n : 4096, i = 0;
        memcpy(dst, src, part);
        uint32_t c = s->crc;
        for (; i + 8 <= part; i += 8) {
            uint64_t word;
            memcpy(&word, dst + i, 8);
            c = __crc32d(c, word);
        }
        for (; i < part; i++) c = __crc32b(c, dst[i]);
        s->crc = c;
        s->copied += part;
        dst += part, src += part, n -= part;
    }
}
