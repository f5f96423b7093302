/* The matrix unit of a core (AMX): whether this process may use it, and how its tiles are set. */

#pragma once

#include "cpu_level.h"

#include <stdint.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of `tileconfig`: how many rows of how many bytes each tile has. */
struct tiles { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } __attribute__((packed));

/* Whether there is one, and the kernel lets this process use it. */
static int may_use_amx(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!may_use(LEVEL_AMX) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return 0;
    return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

/* Sets all eight tiles to so many rows of 64 bytes. */
__attribute__((target("amx-tile"))) static inline void set_tiles(const int64_t rows[8]) {
    struct tiles tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.row_bytes[i] = 64, tiles.rows[i] = (uint8_t)rows[i];
    __asm__ volatile("" : : "r"(&tiles) : "memory"); /* the intrinsic declares a read of 8 bytes only */
    _tile_loadconfig(&tiles);
}

#else

static int may_use_amx(void) { return 0; }

#endif
