"""How the Triton kernels cut their work: pure rules, on any machine."""

import random

import pytest

from tandem.kernels.triton_tiles import (
    DECODE_PROGRAMS_PER_PROCESSOR,
    DECODE_TILES,
    EXPERT_TILES,
    EXTEND_TILES,
    LATENT_TILES,
    MOST_LATENT_RANK,
    MOST_SPLITS,
    SPLIT_TOKENS,
    WIDE_EXPERT_TILE,
    decode_splits,
    decode_tile,
    expert_row_tiles,
    expert_tile,
    extend_tile,
    latent_tile,
    row_warps,
)

PROCESSORS = 132
WAVE = PROCESSORS * DECODE_PROGRAMS_PER_PROCESSOR


@pytest.mark.parametrize("programs", [1, 8, 24, 64, 88, 100, 128, 132, 133, 264, 4096])
def test_splits_fill_one_wave_and_never_begin_a_second(programs: int) -> None:
    splits = decode_splits(programs, 1 << 20, PROCESSORS)
    assert splits == 1 or splits * programs <= WAVE
    if 1 < splits < MOST_SPLITS:
        assert (splits + 1) * programs > WAVE


def test_splits_have_a_useful_length_and_are_not_too_many() -> None:
    assert decode_splits(1, SPLIT_TOKENS - 1, PROCESSORS) == 1
    assert decode_splits(1, 5 * SPLIT_TOKENS, PROCESSORS) == 5
    assert decode_splits(1, 1 << 20, PROCESSORS) == MOST_SPLITS
    assert [decode_splits(n, 32768, PROCESSORS) for n in (8, 64, 88, 133)] == [33, 4, 3, 1]


def test_tiles_by_width_and_bytes() -> None:
    assert decode_tile(128, 2) == DECODE_TILES[128]
    assert decode_tile(16, 2) == DECODE_TILES[64]
    assert decode_tile(512, 4)[0] == 16
    assert extend_tile(128, 4, 2) == EXTEND_TILES[128]
    assert extend_tile(512, 40, 4)[0] == 64  # every head of a group has a row
    for tile in (decode_tile, lambda width, size: extend_tile(width, 1, size)):
        with pytest.raises(ValueError, match="head width 1024"):
            tile(1024, 2)


def test_a_rows_warps() -> None:
    assert [row_warps(n) for n in (16, 256, 1024, 4096, 32768)] == [1, 1, 4, 16, 16]


def test_heads_of_a_latent_share_a_program() -> None:
    assert [latent_tile(heads, 512, 2).rows for heads in (1, 16, 17, 32, 33, 64, 128)] == [16, 16, 32, 32, 64, 64, 64]
    assert latent_tile(16, 512, 2)[1:] == LATENT_TILES[16]
    assert latent_tile(128, 512, 4)[:2] == (16, 16)
    with pytest.raises(ValueError, match="latents of 1024 numbers"):
        latent_tile(16, 2 * MOST_LATENT_RANK, 2)


def test_splits_of_programs_that_fill_a_multiprocessor_alone() -> None:
    assert decode_splits(8, 32768, PROCESSORS, 1) == 16


def test_experts_with_few_rows_have_small_tiles() -> None:
    assert [expert_tile(pairs, 8, 2).rows for pairs in (1, 128, 129, 512, 513, 1 << 16)] == [16, 16, 64, 64, 128, 128]
    assert expert_tile(512, 8, 2)[1:] == EXPERT_TILES[64]
    assert expert_tile(1 << 16, 8, 4) == WIDE_EXPERT_TILE


def test_there_are_never_more_tiles_of_experts_than_the_grid_has() -> None:
    numbers = random.Random(3)
    for _ in range(300):
        pairs, count, rows = numbers.randint(1, 300), numbers.randint(1, 20), numbers.choice((16, 64))
        chosen = [min(numbers.randrange(count), numbers.randrange(count)) for _ in range(pairs)]
        tiles = sum(-(-chosen.count(expert) // rows) for expert in range(count))
        assert tiles <= expert_row_tiles(pairs, count, rows)
    assert expert_row_tiles(4, 128, 16) == 4
    assert expert_row_tiles(1 << 16, 128, 128) == 512 + 127
