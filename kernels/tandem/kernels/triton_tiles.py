"""Tile sizes, warps and stages of the Triton kernels, by shape alone. Pure; imports no Triton.

There is no search at run time: it costs minutes at a start, and a CUDA graph would keep whatever it found first. The
numbers follow from shared memory, registers and public measurements; none has been tuned on a device by this project.
"""

from __future__ import annotations

from typing import NamedTuple

GATE_TILE, GATE_WARPS = 1024, 4
"""Numbers of a row that one program of an elementwise kernel takes, and its warps."""
CHOOSE_TILE, CHOOSE_WARPS = 4096, 16
"""Scores of a row that its program takes at a time when it draws a token, and its warps: three sums in float64 for each
of 8 numbers a thread stay in registers."""
SORT_TILE = 1024
"""Choices of experts that a program reads at a time."""
EXPERT_TILES = {16: (64, 128, 4, 3), 64: (64, 64, 4, 3), 128: (128, 64, 8, 3)}
"""Products of experts, where an expert has so many rows on the average: (columns of gate and as many of up, numbers a
step, warps, stages). Few rows read weights, many are products: 128 by 256 in 8 warps fill half the registers."""
WIDE_EXPERT_TILE = (16, 32, 32, 4, 2)
"""The same for four-byte numbers, rows first: they have no tensor cores and hold their tiles in registers."""
MOST_ROW_NUMBERS = 32768
"""Padded numbers of a row that one program keeps in registers: 64 a thread in 16 warps."""


DECODE_TILES = {64: (128, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3), 512: (16, 4, 2)}
"""Decode attention, up to this padded head width: (key tile for two-byte numbers, warps, stages). Keys and values of
all stages fit in shared memory beside a second program's. A tile knows nothing of blocks: it looks up each token's."""
DECODE_PROGRAMS_PER_PROCESSOR = 2
SPLIT_TOKENS = 256
"""A split reads at least this many tokens of the longest context that the block table can hold."""
MOST_SPLITS = 64
LATENT_TILES = {16: (32, 4, 2, 2), 32: (32, 8, 2, 1), 64: (16, 8, 2, 1)}
"""Decode attention over latents, up to so many heads of a program: (tokens of a tile, warps, stages, programs that fit
a multiprocessor). Many heads are many products for each byte, for which 64 rows are one instruction of Hopper's; their
answers fill half the registers, and more than 16 tokens beside them spill."""
MOST_LATENT_RANK = 512
EXTEND_TILES = {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2), 512: (32, 16, 8, 2)}
"""Extend attention, up to this padded head width: (rows, key tile, warps, stages) for two-byte numbers. Four-byte ones
have no tensor cores to go through and hold their tiles in registers: a quarter of the rows, half the keys."""


def decode_tile(padded_width: int, element_bytes: int) -> tuple[int, int, int]:
    """(tokens of a key tile, warps, stages) for a head width. Raises ValueError above the widest in the table."""
    for width, (tile, warps, stages) in DECODE_TILES.items():
        if padded_width <= width:
            return max(16, tile * 2 // element_bytes), warps, stages
    raise ValueError(f"no decode kernel for head width {padded_width}, at most {max(DECODE_TILES)}")


class LatentTile(NamedTuple):
    """How decode attention over latents is cut: heads of a program, tokens of a tile."""

    rows: int
    tile: int
    warps: int
    stages: int
    programs_per_processor: int


def latent_tile(heads: int, padded_rank: int, element_bytes: int) -> LatentTile:
    """By heads of a rank and numbers of a latent. Raises ValueError for a latent wider than any kernel has."""
    if padded_rank > MOST_LATENT_RANK:
        raise ValueError(f"no decode kernel for latents of {padded_rank} numbers, at most {MOST_LATENT_RANK}")
    rows = next((rows for rows in LATENT_TILES if heads <= rows), max(LATENT_TILES))
    if element_bytes > 2:
        rows = min(LATENT_TILES)  # four-byte numbers have no tensor cores, and rows would fill the registers
    tile, *others = LATENT_TILES[rows]
    return LatentTile(rows, max(16, tile * 2 // element_bytes), *others)


def decode_splits(
    programs: int, readable_tokens: int, processors: int, per_processor: int = DECODE_PROGRAMS_PER_PROCESSOR
) -> int:
    """Splits of a sequence: as many as fill one wave of programs and have a useful length; at least 1.

    One program above a wave costs a whole second wave; hence the floor. A function of shapes alone, so that a CUDA
    graph stays valid; kernels are compiled for powers of two, not for each number.
    """
    wave = processors * per_processor
    return max(1, min(wave // programs, readable_tokens // SPLIT_TOKENS, MOST_SPLITS))


class ExpertTile(NamedTuple):
    """How products of experts are cut: rows of a program, columns of gate (and as many of up), numbers a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def expert_tile(pairs: int, count: int, element_bytes: int) -> ExpertTile:
    """For `pairs` of token and expert among `count` experts: by the mean of an expert's rows."""
    if element_bytes > 2:
        return ExpertTile(*WIDE_EXPERT_TILE)
    rows = next((rows for rows in EXPERT_TILES if pairs <= rows * count), max(EXPERT_TILES))
    return ExpertTile(rows, *EXPERT_TILES[rows])


def expert_row_tiles(pairs: int, count: int, rows: int) -> int:
    """Tiles of `rows` pairs of one expert that there are at most, whatever was chosen."""
    return (pairs + min(count, pairs) * (rows - 1)) // rows


def extend_tile(padded_width: int, group: int, element_bytes: int) -> tuple[int, int, int, int]:
    """(rows, tokens of a key tile, warps, stages) for a head width. Raises ValueError above the widest in the table."""
    for width, (rows, tile, warps, stages) in EXTEND_TILES.items():
        if padded_width <= width:
            if element_bytes > 2:
                rows, tile = max(16, rows // 4), max(16, tile // 2)
            return max(rows, 1 << (group - 1).bit_length()), tile, warps, stages
    raise ValueError(f"no extend kernel for head width {padded_width}, at most {max(EXTEND_TILES)}")


def row_warps(padded: int) -> int:
    """Warps of a program that holds a row of `padded` numbers (a power of two): about 8 to 16 numbers a thread."""
    return max(1, min(16, padded // 256))
