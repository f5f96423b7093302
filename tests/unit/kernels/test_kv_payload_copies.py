"""Gather, scatter, re-blocking and their checksums: every native path and the Python path against torch indexing."""

import mmap
import os
import random
import subprocess
import sys
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kernels import kv_payload, native
from tandem.kernels.kv_payload import binding
from tandem.kernels.kv_payload.shape import PoolShape

PATHS = ("python", "table", "pclmul", "vpclmul", "arm-crc")


@contextmanager
def using(path: str) -> Iterator[bool]:
    """True if the path can be used here; it is, inside."""
    if path == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "_is_enabled", False)
            yield True
        return
    library = binding.library()
    if library is None:
        yield False
        return
    is_here = library.choose_path(path)
    try:
        yield is_here
    finally:
        assert library.choose_path("")


@st.composite
def cases(draw: st.DrawFn) -> tuple[PoolShape, list[int], range, range]:
    """A pool, blocks of it in any order, some layers and some heads; MLA's single plane and head among them."""
    shape = PoolShape(
        num_blocks=draw(st.integers(1, 6)),
        layers=draw(st.integers(1, 4)),
        planes=draw(st.integers(1, 2)),
        heads=draw(st.sampled_from([1, 2, 3, 4])),
        block_tokens=draw(st.sampled_from([1, 2, 4, 5, 16])),
        row_bytes=draw(st.sampled_from([1, 2, 6, 36, 64, 130])),
    )
    blocks = draw(st.lists(st.integers(0, shape.num_blocks - 1), unique=True))
    first_layer, first_head = draw(st.integers(0, shape.layers - 1)), draw(st.integers(0, shape.heads - 1))
    layers = range(first_layer, draw(st.integers(first_layer + 1, shape.layers)))
    return shape, blocks, layers, range(first_head, draw(st.integers(first_head + 1, shape.heads)))


def random_pool(shape: PoolShape) -> tuple[bytearray, torch.Tensor]:
    data = bytearray(random.Random(3).randbytes(shape.num_blocks * shape.block_bytes))
    dimensions = (shape.num_blocks, shape.layers, shape.planes, shape.heads, shape.block_tokens, shape.row_bytes)
    return data, torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dimensions)


def as_bytes(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().view(-1).tolist())


@settings(deadline=None)
@given(cases(), st.integers(0, 3))
def test_gather_and_scatter_equal_indexing_on_every_path(case: Any, shift: int) -> None:
    shape, blocks, layers, heads = case
    data, pool = random_pool(shape)
    part = pool[:, layers.start : layers.stop, :, heads.start : heads.stop]
    expected = as_bytes(part[blocks])
    for path in PATHS:
        with using(path) as is_here:
            if not is_here:
                continue
            room = bytearray(len(expected) + shift + 1)  # unaligned, and guarded at both ends
            out = memoryview(room)[shift : shift + len(expected)]
            assert kv_payload.gather(memoryview(data), shape, blocks, layers, heads, out) == zlib.crc32(expected)
            assert bytes(room) == bytes(shift) + expected + b"\0"
            fresh = random.Random(4).randbytes(len(expected))
            target, wanted = bytearray(data), pool.clone()
            crc = kv_payload.scatter(memoryview(target), shape, blocks, layers, heads, memoryview(b"x" + fresh)[1:])
            assert crc == zlib.crc32(fresh)
            if blocks:
                update = torch.frombuffer(bytearray(fresh), dtype=torch.uint8).view(part[blocks].shape)
                wanted[:, layers.start : layers.stop, :, heads.start : heads.stop][blocks] = update
            assert bytes(target) == as_bytes(wanted)


@settings(deadline=None)
@given(cases(), st.integers(1, 20), st.integers(0, 15), st.integers(0, 5))
def test_reblock_equals_laying_the_tokens_out_anew(case: Any, tokens: int, offset: int, targets: int) -> None:
    shape, blocks, layers, heads = case
    offset %= shape.block_tokens
    data, pool = random_pool(shape)
    part = pool[:, layers.start : layers.stop, :, heads.start : heads.stop][blocks]
    flat = part.permute(1, 2, 3, 0, 4, 5).reshape(*part.shape[1:4], -1, shape.row_bytes)[..., offset:, :]
    missing = max(0, targets * tokens - flat.shape[-2])
    flat = torch.nn.functional.pad(flat, (0, 0, 0, missing))[..., : targets * tokens, :]
    wanted = flat.reshape(*part.shape[1:4], targets, tokens, shape.row_bytes).permute(3, 0, 1, 2, 4, 5)
    expected = as_bytes(wanted)
    for path in PATHS:
        with using(path) as is_here:
            if not is_here:
                continue
            out = bytearray(b"\xff" * len(expected))
            crc = kv_payload.reblock(
                memoryview(data), shape, blocks, layers, heads, memoryview(out),
                offset_tokens=offset, target_tokens=tokens,
            )  # fmt: skip
            assert bytes(out) == expected
            assert crc == zlib.crc32(expected)


@settings(deadline=None)
@given(st.binary(max_size=5000), st.integers(0, 9))
def test_copy_and_checksum_equal_zlib_on_every_path(data: bytes, skip: int) -> None:
    view = memoryview(data)[skip:]
    for path in PATHS:
        with using(path) as is_here:
            if is_here:
                out = bytearray(len(view))
                assert kv_payload.copy(view, memoryview(out)) == kv_payload.crc32(view) == zlib.crc32(view)
                assert out == view


def test_buffers_of_larger_items_are_taken_as_bytes() -> None:
    numbers = memoryview(array("I", range(5000)))
    for path in ("python", ""):
        with using(path):
            out = memoryview(bytearray(numbers.nbytes))
            assert kv_payload.copy(numbers, out.cast("I")) == kv_payload.crc32(numbers) == zlib.crc32(numbers)
            assert out == numbers.cast("B")


@pytest.mark.slow
@pytest.mark.parametrize("heads", [range(1), range(2)])
@pytest.mark.parametrize("path", PATHS)
def test_the_sum_is_of_what_landed_even_if_the_payload_is_written_meanwhile(path: str, heads: range) -> None:
    """The runs are no whole number of stripes, so that every way of the copy is taken."""
    shape = PoolShape(num_blocks=64, layers=2, planes=2, heads=2, block_tokens=5, row_bytes=52)
    size = shape.payload_bytes(shape.num_blocks, range(2), heads)
    pool, landed = memoryview(bytearray(shape.num_blocks * shape.block_bytes)), memoryview(bytearray(size))
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, size)
    broken = [sys.executable, "-c", _SCRIBBLER, str(descriptor), str(size)]
    with (
        mmap.mmap(descriptor, size) as ring,
        subprocess.Popen(broken, pass_fds=[descriptor], stdout=subprocess.PIPE) as sender,
        using(path) as is_here,
    ):
        os.close(descriptor)
        try:
            if not is_here:
                pytest.skip("not on this machine")
            assert sender.stdout is not None
            assert sender.stdout.read(1) == b"."
            for _ in range(400):
                with memoryview(ring) as payload:
                    crc = kv_payload.scatter(pool, shape, range(shape.num_blocks), range(2), heads, payload)
                kv_payload.gather(pool, shape, range(shape.num_blocks), range(2), heads, landed)
                assert crc == zlib.crc32(landed)
        finally:
            sender.kill()


_SCRIBBLER = """
import mmap, os, sys
ring = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))
os.write(1, b".")
while True:
    ring[:] = bytes(len(ring))
    ring[:] = b"\\xff" * len(ring)
"""


def test_a_payload_of_a_megabyte_is_summed_like_zlib() -> None:
    shape = PoolShape(num_blocks=40, layers=30, planes=2, heads=3, block_tokens=16, row_bytes=96)
    data, pool = random_pool(shape)
    for heads in (range(3), range(1, 3)):
        blocks = list(range(39, 30, -1))
        out = bytearray(shape.payload_bytes(len(blocks), range(5, 30), heads))
        for path in PATHS:
            with using(path) as is_here:
                if is_here:
                    crc = kv_payload.gather(memoryview(data), shape, blocks, range(5, 30), heads, memoryview(out))
                    assert crc == zlib.crc32(out)
                    assert torch.equal(
                        torch.frombuffer(out, dtype=torch.uint8),
                        pool[blocks, 5:30][:, :, :, heads.start : heads.stop].reshape(-1),
                    )


SHAPE = PoolShape(num_blocks=4, layers=3, planes=2, heads=2, block_tokens=4, row_bytes=6)


@pytest.mark.parametrize("path", ["python", ""])
@pytest.mark.parametrize(
    ("blocks", "layers", "heads", "extra"),
    [
        ([4], range(3), range(2), 0),
        ([-1], range(3), range(2), 0),
        ([2**40], range(3), range(2), 0),
        ([0, 1], range(1, 4), range(2), 0),
        ([0], range(3), range(1, 3), 0),
        ([0], range(3), range(0, 2, 2), 0),
        ([0], range(2, 2), range(2), 0),
        ([0], range(3), range(2), 1),
        ([0], range(3), range(2), -1),
    ],
)
def test_what_does_not_fit_is_refused_before_memory_is_touched(
    path: str, blocks: list[int], layers: range, heads: range, extra: int
) -> None:
    data, _ = random_pool(SHAPE)
    before = bytes(data)
    payload = bytearray(b"\xee" * (SHAPE.payload_bytes(len(blocks), layers, heads) + extra))
    filled = bytes(payload)
    with using(path):
        for move in (kv_payload.gather, kv_payload.scatter):
            with pytest.raises(ValueError, match=r"outside|buffer"):
                move(memoryview(data), SHAPE, blocks, layers, heads, memoryview(payload))
        with pytest.raises(ValueError, match=r"outside|buffer"):
            kv_payload.reblock(
                memoryview(data), SHAPE, blocks, layers, heads, memoryview(payload), offset_tokens=0, target_tokens=4
            )
    assert bytes(data) == before
    assert bytes(payload) == filled


def test_a_pool_smaller_than_its_shape_and_wrong_offsets_are_refused() -> None:
    data, _ = random_pool(SHAPE)
    out = memoryview(bytearray(SHAPE.block_bytes))
    with pytest.raises(ValueError, match="hold no 4 blocks"):
        kv_payload.gather(memoryview(data)[1:], SHAPE, [0], range(3), range(2), out)
    for offset, tokens in ((-1, 4), (4, 4), (0, 0)):
        with pytest.raises(ValueError, match="tokens from token"):
            kv_payload.reblock(
                memoryview(data), SHAPE, [0], range(3), range(2), out, offset_tokens=offset, target_tokens=tokens
            )
    with pytest.raises(ValueError, match="for a buffer of"):
        kv_payload.copy(out, out[1:])


def test_a_read_only_target_is_refused() -> None:
    data, _ = random_pool(SHAPE)
    with pytest.raises((BufferError, TypeError)):
        kv_payload.gather(memoryview(data), SHAPE, [0], range(3), range(2), memoryview(bytes(SHAPE.block_bytes)))
