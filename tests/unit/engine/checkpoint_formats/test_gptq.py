"""GPTQ: the rule by hand for all numbers of bits, both versions of zeros, orders of inputs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tests.unit.engine.checkpoint_formats.packing import dense_rows, format_of, loaded, shares_are_the_whole

INPUTS, OUTPUTS, GROUP = 96, 64, 32


def drawn(
    bits: int, *, group: int = GROUP, is_ordered: bool = False, version: int = 1, zero: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """A checkpoint's tensors and the weight that is meant."""
    random, groups = torch.Generator().manual_seed(bits), INPUTS // group
    q = torch.randint(0, 1 << bits, (INPUTS, OUTPUTS), generator=random)
    zeros = torch.randint(1, 1 << bits, (groups, OUTPUTS), generator=random)
    if zero is not None:
        zeros.fill_(zero)
    scales = (torch.rand((groups, OUTPUTS), generator=random) / 8).half()
    of = torch.arange(INPUTS) // group
    if is_ordered:
        of = of[torch.randperm(INPUTS, generator=random)]
    meant = torch.empty(OUTPUTS, INPUTS)
    for k in range(INPUTS):
        meant[:, k] = (q[k] - zeros[of[k]]).float() * scales[of[k]].float()
    tensors = {
        "a.qweight": dense_rows(q.T, bits).T, "a.qzeros": dense_rows(zeros - int(version == 1), bits),
        "a.scales": scales, "a.g_idx": of.int(),
    }  # fmt: skip
    return tensors, meant


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_numbers_are_those_of_the_rule(bits: int, is_ordered: bool, version: int, tmp_path: Path) -> None:
    tensors, meant = drawn(bits, is_ordered=is_ordered, version=version)
    if not is_ordered:
        del tensors["a.g_idx"]
    name = "gptq" if version == 1 else "gptq_v2"
    stored = format_of(quant_method="gptq", bits=bits, group_size=GROUP, sym=False, checkpoint_format=name)
    shares_are_the_whole(tmp_path, tensors, meant, stored)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_zeros_of_symmetric_numbers_tell_their_version(bits: int, version: int, tmp_path: Path) -> None:
    """Under the first version's name, as GPTQModel writes both."""
    tensors, meant = drawn(bits, version=version, zero=1 << (bits - 1))
    stored = format_of(quant_method="gptq", bits=bits, group_size=GROUP, sym=True)
    assert torch.equal(loaded(tmp_path, tensors, (OUTPUTS, INPUTS), stored), meant)


def test_patterns_of_modules_have_settings_of_their_own(tmp_path: Path) -> None:
    """The first weight has 8 bits, the second 4, the third is plain."""
    wide, meant_wide = drawn(8, group=INPUTS)
    narrow, meant_narrow = drawn(4)
    plain = torch.arange(12.0).view(3, 4)
    tensors = {
        **{f"layers.0.{key}": tensor for key, tensor in wide.items()},
        **{f"layers.1.{key}": tensor for key, tensor in narrow.items()}, "layers.2.a.weight": plain,
    }  # fmt: skip
    rules = {r"+:layers\.0": {"bits": 8, "group_size": -1}, r"-:layers\.2": {}}
    stored = format_of(quant_method="gptq", bits=4, group_size=GROUP, sym=False, dynamic=rules)
    for layer, meant in enumerate((meant_wide, meant_narrow, plain)):
        some = {key: tensor for key, tensor in tensors.items() if key.startswith(f"layers.{layer}")}
        shape, key = (meant.shape[0], meant.shape[1]), f"layers.{layer}.a.weight"
        assert torch.equal(loaded(tmp_path, some, shape, stored, key=key), meant)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"bits": 5}, "5 bits"), ({"checkpoint_format": "marlin"}, "format marlin"), ({"dynamic": {"(": {}}}, "pattern"),
     ({"dynamic": [1]}, "dynamic is"), ({"group_size": 1.5}, "group_size is 1.5")],
)  # fmt: skip
def test_other_variants_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        format_of(quant_method="gptq", **{"bits": 4, "group_size": 128, **changes})


@pytest.mark.parametrize(
    ("key", "wrong", "complaint"),
    [
        ("a.g_idx", torch.full((INPUTS,), 3, dtype=torch.int32), "g_idx names groups"),
        ("a.g_idx", torch.zeros(5, dtype=torch.int32), "g_idx must be"),
        ("a.qzeros", torch.zeros(3, 7, dtype=torch.int32), "qzeros must be"),
        ("a.scales", torch.full((3, OUTPUTS), float("inf")).half(), "not finite"),
        ("a.qweight", torch.zeros(12, OUTPUTS, dtype=torch.int64), "torch.int64, not torch.int32"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_an_error(key: str, wrong: Tensor, complaint: str, tmp_path: Path) -> None:
    tensors, _ = drawn(4)
    stored = format_of(quant_method="gptq", bits=4, group_size=GROUP)
    with pytest.raises(ModelError, match=r"a\.weight in .* cannot be unpacked") as caught:
        loaded(tmp_path, {**tensors, key: wrong}, (OUTPUTS, INPUTS), stored)
    assert complaint in caught.value.why
