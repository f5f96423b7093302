"""compressed-tensors: weights that the library compresses are the numbers to which it decompresses them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from tandem.core.errors import ModelError
from tests.unit.engine.checkpoint_formats.packing import format_of, loaded, shares_are_the_whole

OUTPUTS, INPUTS = 64, 192
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8, outputs": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8, all": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int8 with zeros": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8, groups": ("naive-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}),
    "FP8, outputs": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "FP8, all": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "FP8, blocks": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]}
    ),
    "4 bits": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}),
    "4 bits with zeros": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    ),
    "3 bits with zeros": (
        "pack-quantized", {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 96, "symmetric": False}
    ),
    "5 bits": ("pack-quantized", {"num_bits": 5, "type": "int", "strategy": "channel"}),
    "8 bits, packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "MXFP4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "NVFP4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}  # fmt: skip


def compressed(form: str, weights: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """A weight as the library stores it, and as it reads it, with scales in `dtype`."""
    args = QuantizationArgs(**weights)
    random = torch.Generator().manual_seed(5)
    weight = torch.randn((OUTPUTS, INPUTS), generator=random)
    rows, columns = {
        "channel": (OUTPUTS, 1), "tensor": (1, 1), "block": (OUTPUTS // 32, INPUTS // 64),
    }.get(weights["strategy"], (OUTPUTS, INPUTS // (weights.get("group_size") or 1)))  # fmt: skip
    scale = (0.01 + torch.rand((rows, columns), generator=random) / 4).to(dtype)
    state: dict[str, Tensor] = {"weight": weight}
    if "mx" in form:
        scale = torch.exp2(torch.randint(-6, 3, (rows, columns), generator=random).float()).to(dtype)
    if weights["strategy"] == "tensor":
        scale = scale.reshape(1)
    state["weight_scale"] = scale
    if weights["strategy"] == "tensor_group":
        state["weight_global_scale"] = torch.tensor([300.0])
        state["weight_scale"] = (scale.float() * 300).to(torch.float8_e4m3fn).to(dtype)
    if not weights.get("symmetric", True):
        most = 1 << (weights["num_bits"] - 1)
        zeros = torch.randint(-most, most, tuple(scale.shape), generator=random)
        state["weight_zero_point"] = zeros.to(torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry(form)
    stored = library.compress(state, scheme)
    return stored, library.decompress(stored, scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_library(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With scales in float32 to the bit, and when they are rounded to the dtype in which it multiplies."""
    form, weights = CASES[case]
    tensors, expected = compressed(form, weights, dtype)
    group = {"targets": ["Linear"], "weights": weights}
    stored = format_of(
        quant_method="compressed-tensors", format=form, config_groups={"group_0": group}, ignore=["lm_head"]
    )
    named = {f"a.{name}": tensor for name, tensor in tensors.items()}
    found = loaded(tmp_path, named, (OUTPUTS, INPUTS), stored)
    assert torch.equal(found.to(expected.dtype), expected)
    shares_are_the_whole(tmp_path, named, found, stored)


def test_groups_of_modules_have_schemes_of_their_own_and_others_are_plain(tmp_path: Path) -> None:
    wide, meant_wide = compressed(*CASES["8 bits, packed"], torch.float32)
    narrow, meant_narrow = compressed(*CASES["4 bits"], torch.float32)
    stored = format_of(
        quant_method="compressed-tensors", format="pack-quantized",
        config_groups={
            "narrow": {"targets": ["Linear"], "weights": CASES["4 bits"][1]},
            "wide": {"targets": [r"re:.*\.down_proj$"], "weights": CASES["8 bits, packed"][1]},
        },
    )  # fmt: skip
    assert "4 bits" in stored.words
    assert "8 bits" in stored.words
    for name, tensors, meant in (("b.down_proj", wide, meant_wide), ("b.up_proj", narrow, meant_narrow)):
        named = {f"{name}.{part}": tensor for part, tensor in tensors.items()} | {f"{name}.input_scale": torch.ones(1)}
        found = loaded(tmp_path, named, (OUTPUTS, INPUTS), stored, key=f"{name}.weight")
        assert torch.equal(found, meant)
    plain = torch.arange(6.0).view(2, 3)
    assert torch.equal(loaded(tmp_path, {"lm_head.weight": plain}, (2, 3), stored, key="lm_head.weight"), plain)


def test_groups_of_inputs_may_be_in_an_order_of_their_own(tmp_path: Path) -> None:
    tensors, meant = compressed(*CASES["4 bits"], torch.float32)
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))
    stored = format_of(
        quant_method="compressed-tensors", format="pack-quantized",
        config_groups={"group_0": {"targets": ["Linear"], "weights": CASES["4 bits"][1]}},
    )  # fmt: skip
    of = torch.arange(INPUTS) // 64
    scale = tensors["weight_scale"]
    shuffled = meant / scale[:, of] * scale[:, of[order]]
    named = {f"a.{name}": tensor for name, tensor in tensors.items()} | {"a.weight_g_idx": of[order].int()}
    torch.testing.assert_close(loaded(tmp_path, named, (OUTPUTS, INPUTS), stored), shuffled, rtol=1e-6, atol=0)
    named["a.weight_g_idx"] = torch.full((INPUTS,), -1, dtype=torch.int32)
    assert torch.equal(loaded(tmp_path, named, (OUTPUTS, INPUTS), stored), meant)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "marlin-24"}, "format marlin-24"), ({"format": "dense"}, "format dense"),
        ({"config_groups": None}, "config_groups is None"),
        ({"config_groups": {"a": {"targets": ["Linear"]}}}, "how weights are stored"),
        ({"config_groups": {"a": {"targets": ["re:("], "weights": {}}}}, "is not valid"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "token"}}}}, "strategy token"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 16}}}}, "16 bits"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "block"}}}}, "block_structure is"),
        (
            {"config_groups": {"a": {"targets": [], "weights": {"strategy": "block", "block_structure": [0, 128]}}}},
            r"block_structure is \[0, 128\]",
        ),
    ],
)  # fmt: skip
def test_other_variants_are_refused(changes: dict[str, Any], complaint: str) -> None:
    groups = {"a": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    with pytest.raises(ModelError, match=complaint):
        format_of(**{**config, **changes})


def test_a_scale_of_mxfp4_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    """An exponent of 255 stands for that, and would be infinite as a power of two."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    stored = format_of(
        quant_method="compressed-tensors", format="mxfp4-pack-quantized", config_groups={"group_0": group}
    )
    tensors = {
        "a.weight_packed": torch.full((4, 32), 0x22, dtype=torch.uint8),
        "a.weight_scale": torch.full((4, 2), 128, dtype=torch.uint8),
    }
    assert torch.equal(loaded(tmp_path, tensors, (4, 64), stored), torch.full((4, 64), 2.0))
    tensors["a.weight_scale"][3, 1] = 255
    with pytest.raises(ModelError, match="cannot be unpacked") as caught:
        loaded(tmp_path, tensors, (4, 64), stored)
    assert "scales are not finite" in caught.value.why


def test_a_weight_that_was_not_quantised_is_not_scaled(tmp_path: Path) -> None:
    """A checkpoint that was saved before it was compressed has scales beside plain weights."""
    form, weights = CASES["int8, outputs"]
    tensors, _ = compressed(form, weights, torch.float32)
    group = {"targets": ["Linear"], "weights": weights}
    stored = format_of(quant_method="compressed-tensors", format=form, config_groups={"group_0": group})
    named = {f"a.{name}": tensor for name, tensor in tensors.items()} | {"a.weight": tensors["weight"].bfloat16()}
    with pytest.raises(ModelError, match="cannot be unpacked") as caught:
        loaded(tmp_path, named, (OUTPUTS, INPUTS), stored)
    assert "torch.bfloat16, which are not quantised" in caught.value.why


@pytest.mark.parametrize(
    ("part", "wrong", "complaint"),
    [
        ("weight_scale", torch.ones(OUTPUTS, 2), "weight_scale must be"),
        ("weight_shape", torch.tensor([64, 500]), "weight_packed"),
        ("weight_scale", torch.full((OUTPUTS, 3), float("nan")), "not finite"),
        ("weight_g_idx", torch.full((INPUTS,), 9, dtype=torch.int32), "weight_g_idx"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_an_error(part: str, wrong: Tensor, complaint: str, tmp_path: Path) -> None:
    tensors, _ = compressed(*CASES["4 bits"], torch.float32)
    stored = format_of(
        quant_method="compressed-tensors", format="pack-quantized",
        config_groups={"group_0": {"targets": ["Linear"], "weights": CASES["4 bits"][1]}},
    )  # fmt: skip
    named = {f"a.{name}": tensor for name, tensor in {**tensors, part: wrong}.items()}
    with pytest.raises(ModelError, match=r"a\.weight in .* cannot be unpacked") as caught:
        loaded(tmp_path, named, (OUTPUTS, INPUTS), stored)
    assert complaint in caught.value.why
