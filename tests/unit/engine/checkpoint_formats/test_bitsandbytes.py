"""bitsandbytes: numbers of 4 and 8 bits by the rule, with scales of 32 and of 8 bits, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.engine.weights import TensorSplit
from tests.unit.engine.checkpoint_formats.packing import format_of, loaded, shares_are_the_whole

OUTPUTS, INPUTS, BLOCK, NESTED = 24, 82, 64, 16
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
OF_4, OF_8 = (
    format_of(quant_method="bitsandbytes", load_in_4bit=True),
    format_of(quant_method="bitsandbytes", load_in_8bit=True),
)


def drawn(*, is_nested: bool, kind: str = "nf4") -> tuple[dict[str, Tensor], Tensor]:
    """A checkpoint's tensors and the weight that is meant. Rows end within blocks, and the second one within a byte's
    neighbours."""
    random = torch.Generator().manual_seed(7)
    count = OUTPUTS * INPUTS
    q = torch.randint(0, 16, (count,), generator=random)
    blocks = -(-count // BLOCK)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": [OUTPUTS, INPUTS]}
    tensors = {
        "a.weight": torch.tensor([[16 * a + b] for a, b in q.view(-1, 2).tolist()], dtype=torch.uint8),
        "a.weight.quant_map": torch.tensor(NF4),
    }  # fmt: skip
    if is_nested:
        codes = torch.linspace(-1, 1, 256)
        numbers = torch.randint(0, 256, (blocks,), generator=random)
        outer = torch.rand(-(-blocks // NESTED), generator=random)
        scales = [codes[n] * outer[block // NESTED] + torch.tensor(0.25) for block, n in enumerate(numbers.tolist())]
        absmax = torch.stack(scales)
        state |= {"nested_blocksize": NESTED, "nested_offset": 0.25, "nested_dtype": "float32"}
        tensors |= {
            "a.weight.absmax": numbers.to(torch.uint8), "a.weight.nested_absmax": outer,
            "a.weight.nested_quant_map": codes,
        }  # fmt: skip
    else:
        absmax = torch.rand(blocks, generator=random)
        tensors["a.weight.absmax"] = absmax
    words = json.dumps(state).encode()
    tensors[f"a.weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(words), dtype=torch.uint8)
    meant = torch.empty(count)
    for place, number in enumerate(q.tolist()):
        meant[place] = torch.tensor(NF4[number]) * absmax[place // BLOCK]
    return tensors, meant.view(OUTPUTS, INPUTS)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_numbers_of_4_bits_are_those_of_the_rule(is_nested: bool, kind: str, tmp_path: Path) -> None:
    tensors, meant = drawn(is_nested=is_nested, kind=kind)
    shares_are_the_whole(tmp_path, tensors, meant, OF_4)


def test_rows_of_an_odd_number_begin_within_a_byte(tmp_path: Path) -> None:
    """Three rows of five numbers, by hand."""
    q = [*range(15), 0]
    state = {"shape": [3, 5], "blocksize": 64}
    tensors = {
        "a.weight": torch.tensor([[16 * a + b] for a, b in zip(q[::2], q[1::2], strict=True)], dtype=torch.uint8),
        "a.weight.quant_map": torch.arange(16.0), "a.weight.absmax": torch.tensor([2.0]),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    shares_are_the_whole(tmp_path, tensors, 2 * torch.arange(15.0).view(3, 5), OF_4, ranks=1)
    rows = loaded(tmp_path, tensors, (3, 5), OF_4, split=TensorSplit.ROWS, ranks=3)
    assert torch.equal(rows, 2 * torch.arange(15.0).view(3, 5))


def test_numbers_of_8_bits_are_those_of_the_library(tmp_path: Path) -> None:
    """Every number under large and small scales; it multiplies by the scale, then by 1 / 127."""
    numbers = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(4, 1)
    scales = torch.tensor([0.001, 0.7, 3.0, 127.0])
    tensors = {"a.weight": numbers, "a.SCB": scales, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    meant = numbers.float() * scales[:, None] * 7.874015718698502e-3
    shares_are_the_whole(tmp_path, tensors, meant, OF_8)


def test_a_model_that_names_no_bits_or_both_is_refused() -> None:
    for flags in ({}, {"load_in_4bit": True, "load_in_8bit": True}):
        with pytest.raises(ModelError, match="one of load_in_4bit and load_in_8bit"):
            format_of(quant_method="bitsandbytes", **flags)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"shape": [1, 2]}, "weight must be"), ({"shape": "wide"}, "the shape 'wide'"),
        ({"blocksize": 0}, "block size 0"), ({"blocksize": 32}, "absmax must be"),
        ({"nested_blocksize": None}, "nested block size None"),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_are_an_error(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    tensors, _ = drawn(is_nested=True)
    key = "a.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[key].tolist())) | changes
    tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"a\.weight in .* cannot be unpacked") as caught:
        loaded(tmp_path, tensors, (OUTPUTS, INPUTS), OF_4)
    assert complaint in caught.value.why


def test_blocks_beyond_all_numbers_are_one_block(tmp_path: Path) -> None:
    """A size of a nested block that no memory would hold, and sizes of more than 64 bits."""
    state = {"shape": [2, 4], "blocksize": 1 << 70, "nested_blocksize": 1 << 40, "nested_offset": 0.5}
    tensors = {
        "a.weight": torch.tensor([[0x12]] * 4, dtype=torch.uint8), "a.weight.quant_map": torch.arange(16.0),
        "a.weight.absmax": torch.tensor([3], dtype=torch.uint8), "a.weight.nested_absmax": torch.tensor([2.0]),
        "a.weight.nested_quant_map": torch.arange(256.0),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    shares_are_the_whole(tmp_path, tensors, 6.5 * torch.tensor([[1.0, 2.0, 1.0, 2.0]] * 2), OF_4, ranks=1)


def test_numbers_of_another_dtype_are_an_error(tmp_path: Path) -> None:
    tensors, _ = drawn(is_nested=False)
    tensors["a.weight"] = tensors["a.weight"].to(torch.int8)
    with pytest.raises(ModelError, match="cannot be unpacked") as caught:
        loaded(tmp_path, tensors, (OUTPUTS, INPUTS), OF_4)
    assert "torch.int8, not torch.uint8" in caught.value.why


@pytest.mark.parametrize("words", [b"not JSON", b"[1]"])
def test_a_state_that_is_no_object_is_an_error(words: bytes, tmp_path: Path) -> None:
    tensors, _ = drawn(is_nested=False)
    tensors["a.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(words), dtype=torch.uint8)
    with pytest.raises(ModelError, match="cannot be unpacked"):
        loaded(tmp_path, tensors, (OUTPUTS, INPUTS), OF_4)
