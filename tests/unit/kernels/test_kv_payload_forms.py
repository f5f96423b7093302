"""Conversion and codecs: the native code equals the torch reference bit for bit, and the reference equals `.to`."""

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.kv_layout import DTYPE_BYTES
from tandem.kernels import kv_payload, native
from tandem.kernels.dtypes import TORCH_DTYPES
from tandem.kernels.kv_payload import binding
from tandem.kernels.kv_payload.reference import convert_reference, decode_reference, encode_reference

NAMES = tuple(TORCH_DTYPES)
PATHS = ("python", "table", "pclmul", "")  # in the library the path also chooses the vector width of conversions


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "python":
        monkeypatch.setattr(native, "_is_enabled", False)
        yield
        return
    library = binding.library()
    if library is None or not library.choose_path(request.param):
        pytest.skip("not on this machine")
    yield
    assert library.choose_path("")


def raw(x: torch.Tensor) -> bytearray:
    return bytearray(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def every_value(name: str) -> torch.Tensor:
    """All 65,536 values of a 16-bit type, or a hundred thousand bit patterns of float32, its edges among them."""
    if name != "float32":
        return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[name])
    edges = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    halves = [(e << 23) + m for e in range(90, 145) for m in (0, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000,
              0x8001, 0x17FFF, 0x18000, 0x7FF000, 0x7FFFFF)]  # fmt: skip
    patterns = torch.tensor([*edges, *halves], dtype=torch.int64)
    patterns = torch.cat([patterns, patterns + 2**31])
    drawn = torch.randint(0, 2**32, (100_001,), generator=torch.Generator().manual_seed(5))
    both = torch.cat([patterns, drawn])
    return torch.where(both >= 2**31, both - 2**32, both).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_conversion_equals_torch_bit_for_bit(path: None, name: str, to: str) -> None:
    x = every_value(name)
    expected = convert_reference(x, TORCH_DTYPES[to])
    out = bytearray(len(x) * DTYPE_BYTES[to])
    kv_payload.convert(memoryview(raw(x)), name, memoryview(out), to)
    assert out == raw(expected)
    plain = x.to(torch.float32).to(TORCH_DTYPES[to])
    numbers = ~plain.isnan()
    assert torch.equal(expected[numbers], plain[numbers])
    assert torch.equal(expected.isnan(), plain.isnan())
    if name != to:
        assert torch.equal(x.to(TORCH_DTYPES[to])[numbers], plain[numbers])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_codecs_equal_the_reference_bit_for_bit(path: None, codec: str, name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    for rows, size in ((1, 1), (7, 33), (40, 1024), (3, 16 * 576)):
        x = torch.randn(rows, size, generator=generator) * torch.logspace(-12, 6, rows)[:, None]
        check_codec(codec, name, x.to(TORCH_DTYPES[name]))
    check_codec(codec, name, every_value(name)[: 2048 * 31].view(31, -1))


def check_codec(codec: str, name: str, x: torch.Tensor) -> None:
    rows, size = x.shape
    scales, codes = encode_reference(codec, x)
    out = bytearray(kv_payload.encoded_bytes(rows, size))
    kv_payload.encode(codec, memoryview(raw(x)), name, memoryview(out), row_size=size)
    assert out == raw(scales) + raw(codes)
    for to in NAMES:
        back = bytearray(rows * size * DTYPE_BYTES[to])
        kv_payload.decode(codec, memoryview(out), memoryview(back), to, row_size=size)
        assert back == raw(decode_reference(codec, scales, codes, TORCH_DTYPES[to]))


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_every_code_is_decoded_as_the_reference_does(path: None, codec: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 256)
    for scale in (0.0, 1.0, 2.0**-149, 3.7e-3, 1e30):
        payload = bytearray(struct.pack("<f", scale)) + raw(codes)
        for to in NAMES:
            back = bytearray(256 * DTYPE_BYTES[to])
            kv_payload.decode(codec, memoryview(payload), memoryview(back), to, row_size=256)
            expected = decode_reference(codec, torch.tensor([scale]), codes, TORCH_DTYPES[to])
            assert back == raw(expected)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from(["int8", "fp8"]))
def test_any_row_of_floats_survives_within_its_bound(values: list[float], codec: str) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    check_codec(codec, "float32", x)
    scales, codes = encode_reference(codec, x)
    back = decode_reference(codec, scales, codes, torch.float32)[0].tolist()
    amax = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    for before, after in zip(values, back, strict=True):
        if math.isnan(before):
            assert math.isnan(after)
        elif math.isinf(before):
            assert abs(after) <= amax * 1.0001
        elif 2.0**-126 < scales[0] < 2.0**119:  # below, the scale has too few bits; above, code x scale may overflow
            bound = 0.501 * scales[0] if codec == "int8" else max(abs(before) / 15.9, 2.0**-9 * scales[0])
            assert abs(after - before) <= bound


def test_a_row_of_zeros_or_of_nothing_finite_has_scale_zero() -> None:
    for codec in ("int8", "fp8"):
        for row in ([0.0, -0.0], [math.inf, -math.inf], [math.nan, 0.0]):
            scales, codes = encode_reference(codec, torch.tensor([row]))
            assert scales.tolist() == [0.0]
            back = decode_reference(codec, scales, codes, torch.float32)[0].tolist()
            assert [v == 0.0 or math.isnan(v) for v in back] == [True, True]
            assert math.isnan(back[0]) == math.isnan(row[0])


def test_infinities_do_not_spoil_the_other_numbers() -> None:
    row = torch.tensor([[1.0, -0.5, math.inf, 0.25]])
    for codec in ("int8", "fp8"):
        back = decode_reference(codec, *encode_reference(codec, row), torch.float32)[0].tolist()
        assert back == pytest.approx([1.0, -0.5, 1.0, 0.25], rel=0.02)


def test_sizes_and_names_that_do_not_fit_are_refused(path: None) -> None:
    four, six = memoryview(bytearray(4)), memoryview(bytearray(6))
    for arguments in (("float64", "float32"), ("float32", "int8")):
        with pytest.raises(ValueError, match="unknown dtype"):
            kv_payload.convert(four, arguments[0], four, arguments[1])
    with pytest.raises(ValueError, match="whole number"):
        kv_payload.convert(six, "float32", four, "float32")
    with pytest.raises(ValueError, match="for 6 of"):
        kv_payload.convert(four, "bfloat16", six, "float16")
    with pytest.raises(ValueError, match="unknown codec"):
        kv_payload.encode("zip", four, "float16", six, row_size=2)
    for row_size in (0, 3, 1):
        with pytest.raises(ValueError, match="in rows of"):
            kv_payload.encode("int8", four, "float16", six[:5], row_size=row_size)
    with pytest.raises(ValueError, match="in rows of"):
        kv_payload.decode("int8", six[:5], four, "float16", row_size=2)
    kv_payload.encode("int8", four, "float16", six, row_size=2)
    kv_payload.decode("int8", six, four, "float16", row_size=2)


def test_nothing_is_converted_into_nothing(path: None) -> None:
    empty = memoryview(bytearray())
    kv_payload.convert(empty, "float32", empty, "float16")
    kv_payload.encode("int8", empty, "float32", empty, row_size=4)
    kv_payload.decode("fp8", empty, empty, "float32", row_size=4)
