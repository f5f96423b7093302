"""A decoder that passes few rows through all layers in one call: when it reports so, and for which weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.linear import make_linear
from tandem.engine.model_config import read_model_config
from tandem.engine.models import decoder
from tandem.engine.models.decoder import Decoder
from tandem.kernels.fused_layer import DenseRow, LayerParts, PagedRows, fuse
from tests.unit.engine.model.driver import tool

BLOCK_TOKENS = 16


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[[int], Path]:
    """The folder of a random Llama, in bfloat16 and of a width that C code takes."""

    def make(seed: int) -> Path:
        shape = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "bfloat16", "seed": seed}
        tool.make_random_model(tool.RandomModel(family="llama", **shape), tmp_path / f"{seed}")
        return tmp_path / f"{seed}"

    return make


def loaded(folder: Path) -> Decoder:
    made = Decoder(read_model_config(folder), dtype=torch.bfloat16, max_positions=64)
    made.load(folder)
    return made


def has_joined(made: Decoder) -> bool:
    c = made.config
    pool = torch.zeros((4, c.layers, 2, c.kv_heads, BLOCK_TOKENS, c.head_dim), dtype=torch.bfloat16)
    return made.join_layers([pool[:, layer] for layer in range(c.layers)], c.attention_scale)


def first_token(made: Decoder, heard: list[str]) -> Tensor:
    """Logits of one token in block 3, with attention that answers with the queries where it is asked."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heard.append(f"layer {layer}")
        return q

    paged = PagedRows(
        tables=torch.tensor([[3]], dtype=torch.int32), lengths=torch.tensor([1], dtype=torch.int32),
        slots=torch.tensor([3 * BLOCK_TOKENS]),
    )  # fmt: skip
    return made.forward(
        torch.tensor([5]), torch.tensor([0]), None, attend, paged, lambda: heard.append("joined layers")
    )


def test_joined_layers_are_told_of_before_there_are_logits(make_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def watched(weight: Tensor, *given: Any, **options: Any) -> Callable[[Tensor], Tensor]:
        linear, is_head = make_linear(weight, *given, **options), weight.shape[0] == 512

        def multiply(x: Tensor) -> Tensor:
            heard.append("logits")
            return linear(x)

        return multiply if is_head else linear

    monkeypatch.setattr(decoder, "make_linear", watched)
    made = loaded(make_folder(3))
    layers = ["joined layers"] if has_joined(made) else ["layer 0", "layer 1"]
    first_token(made, heard)
    assert heard == [*layers, "logits"]


def test_weights_that_are_loaded_anew_are_not_joined_by_the_old_ones(make_folder: Any) -> None:
    made = loaded(make_folder(3))
    heard: list[str] = []
    has_joined(made)
    made.load(make_folder(4))
    assert torch.equal(first_token(made, heard), first_token(loaded(make_folder(4)), []))
    assert heard == ["layer 0", "layer 1"]


@pytest.mark.parametrize("has_float_norms", [False, True])
def test_norms_that_multiply_in_float32_have_no_code_for_a_single_row(
    has_float_norms: bool, make_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LayerParts] = []

    def watched(parts: LayerParts) -> DenseRow | None:
        asked.append(parts)
        return fuse(parts)

    monkeypatch.setattr(decoder, "fuse", watched)
    folder = make_folder(3)
    config = replace(read_model_config(folder), has_float_norms=has_float_norms)
    Decoder(config, dtype=torch.bfloat16, max_positions=64).load(folder)
    assert len(asked) == (0 if has_float_norms else 2)
