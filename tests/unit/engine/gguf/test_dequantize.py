"""Every type of block becomes the numbers that the `gguf` package makes of it, to the bit."""

import warnings

import gguf
import numpy
import pytest
import torch

from tandem.core.gguf.types import TENSOR_TYPES
from tandem.engine.gguf.dequantize import DEQUANTIZE, dequantize

SIZES = {kind.name: kind.block_bytes for kind in TENSOR_TYPES.values()}
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where fp16 scales are in a block."""
EDGES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01)
"""Zeros, the least and largest numbers with and without leading bit, infinities, and what is no number, as fp16."""


def expect_equal(name: str, blocks: numpy.ndarray) -> None:
    with warnings.catch_warnings(), numpy.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    got = dequantize(name, torch.from_numpy(blocks.copy())).numpy()
    assert got.dtype == numpy.float32
    assert got.shape == want.shape
    assert (numpy.isnan(got) == numpy.isnan(want)).all()
    exact = numpy.where(numpy.isnan(want), 0, want).view(numpy.uint32)
    assert (numpy.where(numpy.isnan(got), 0, got).view(numpy.uint32) == exact).all()


@pytest.mark.parametrize("name", DEQUANTIZE)
def test_random_blocks(name: str) -> None:
    drawn = numpy.random.default_rng(3)
    expect_equal(name, drawn.integers(0, 256, (4096, SIZES[name]), dtype=numpy.uint8))


@pytest.mark.parametrize("name", DEQUANTIZE)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x7F, 0x80, 0x0F, 0xF0])
def test_blocks_of_one_byte(name: str, fill: int) -> None:
    expect_equal(name, numpy.full((3, SIZES[name]), fill, dtype=numpy.uint8))


@pytest.mark.parametrize("name", HALVES)
def test_scales_at_the_edges(name: str) -> None:
    drawn = numpy.random.default_rng(5)
    for first in EDGES:
        blocks = drawn.integers(0, 256, (len(EDGES), SIZES[name]), dtype=numpy.uint8)
        for place, start in enumerate(HALVES[name]):
            bits = numpy.array([first] * len(EDGES) if place else EDGES, dtype="<u2")
            blocks[:, start : start + 2] = bits.view(numpy.uint8).reshape(-1, 2)
        expect_equal(name, blocks)


def test_every_scale_of_mxfp4() -> None:
    blocks = numpy.random.default_rng(7).integers(0, 256, (256, SIZES["MXFP4"]), dtype=numpy.uint8)
    blocks[:, 0] = range(256)
    expect_equal("MXFP4", blocks)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_number_of_two_bytes(name: str) -> None:
    expect_equal(name, numpy.arange(1 << 16, dtype="<u2").view(numpy.uint8).reshape(-1, 2))


def test_no_block_is_no_number() -> None:
    for name, size in SIZES.items():
        if name in DEQUANTIZE:
            assert dequantize(name, torch.empty((0, size), dtype=torch.uint8)).numel() == 0
