"""AWQ: the rule by hand, all shapes of slices, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tests.unit.engine.checkpoint_formats.packing import awq_words, format_of, loaded, shares_are_the_whole

INPUTS, OUTPUTS, GROUP = 96, 48, 32


def drawn(group: int = GROUP) -> tuple[dict[str, Tensor], Tensor]:
    """A checkpoint's tensors and the weight that is meant."""
    random = torch.Generator().manual_seed(3)
    q = torch.randint(0, 16, (INPUTS, OUTPUTS), generator=random)
    zeros = torch.randint(0, 16, (INPUTS // group, OUTPUTS), generator=random)
    scales = (torch.rand((INPUTS // group, OUTPUTS), generator=random) / 8).half()
    meant = torch.empty(OUTPUTS, INPUTS)
    for k in range(INPUTS):
        meant[:, k] = (q[k] - zeros[k // group]).float() * scales[k // group].float()
    return {"a.qweight": awq_words(q), "a.qzeros": awq_words(zeros), "a.scales": scales}, meant


@pytest.mark.parametrize("group", [GROUP, -1])
def test_numbers_are_those_of_the_rule(group: int, tmp_path: Path) -> None:
    tensors, meant = drawn(INPUTS if group == -1 else group)
    stored = format_of(quant_method="awq", bits=4, group_size=group, version="gemm", zero_point=True)
    shares_are_the_whole(tmp_path, tensors, meant, stored, ranks=3)


def test_a_word_by_hand(tmp_path: Path) -> None:
    tensors = {
        "a.qweight": torch.tensor([[0x76543210]], dtype=torch.int32), "a.qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "a.scales": torch.ones(1, 8, dtype=torch.float16),
    }  # fmt: skip
    stored = format_of(quant_method="awq", bits=4, group_size=-1)
    assert loaded(tmp_path, tensors, (8, 1), stored).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_products_are_the_fp16_numbers_of_the_library_when_they_are_rounded(tmp_path: Path) -> None:
    """AutoAWQ computes (q - zero) · scale in fp16, which rounds once."""
    tensors, meant = drawn()
    stored = format_of(quant_method="awq", bits=4, group_size=GROUP)
    found = loaded(tmp_path, tensors, (OUTPUTS, INPUTS), stored)
    unscaled = {**tensors, "a.scales": torch.ones_like(tensors["a.scales"])}
    whole = loaded(tmp_path, unscaled, (OUTPUTS, INPUTS), stored)
    scales = tensors["a.scales"].T.repeat_interleave(GROUP, 1)
    assert torch.equal(found.half(), whole.half() * scales)
    assert torch.equal(found, meant)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"version": "gemv"}, "version gemv"), ({"bits": 3}, "4 bits"), ({"zero_point": False}, "zero points"),
     ({"group_size": 0}, "group_size is 0")],
)  # fmt: skip
def test_other_variants_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        format_of(quant_method="awq", **{"bits": 4, "group_size": 128, **changes})


@pytest.mark.parametrize(
    ("key", "wrong", "complaint"),
    [
        ("a.scales", torch.ones(2, OUTPUTS).half(), "scales must be"), ("a.qzeros", None, "qzeros is missing"),
        ("a.scales", torch.full((3, OUTPUTS), float("nan")).half(), "not finite"),
        ("a.qweight", torch.zeros(INPUTS, OUTPUTS // 8), "torch.float32, not torch.int32"),
        ("a.qweight", torch.zeros(7, dtype=torch.int32), "qweight must be a matrix"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_an_error(key: str, wrong: Tensor | None, complaint: str, tmp_path: Path) -> None:
    tensors, _ = drawn()
    del tensors[key]
    if wrong is not None:
        tensors[key] = wrong
    with pytest.raises(ModelError, match=r"a\.weight in .* cannot be unpacked") as caught:
        loaded(tmp_path, tensors, (OUTPUTS, INPUTS), format_of(quant_method="awq", bits=4, group_size=GROUP))
    assert complaint in caught.value.why
