"""A decoder that passes a step through all layers in one call: when it reports so, and for which weights."""

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
from tandem.engine.models.joined_layers import JoinedStep
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
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
    joined = JoinedStep(
        paged=paged, on_layers=lambda first, last: heard.append(f"layers {first} to {last}"), together=1
    )
    return made.forward(torch.tensor([5]), torch.tensor([0]), None, attend, joined)


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
    layers = ["layers 0 to 2"] if has_joined(made) else ["layer 0", "layer 1"]
    first_token(made, heard)
    assert heard == [*layers, "logits"]


def test_weights_that_are_loaded_anew_are_not_joined_by_the_old_ones(make_folder: Any) -> None:
    made = loaded(make_folder(3))
    heard: list[str] = []
    has_joined(made)
    made.load(make_folder(4))
    assert torch.equal(first_token(made, heard), first_token(loaded(make_folder(4)), []))
    assert heard == ["layer 0", "layer 1"]


@pytest.mark.parametrize("quantize", ["int8", "w8a8", "int4", "w4a16"])
def test_chunks_beside_decodes_have_the_logits_of_single_layers(quantize: str, make_folder: Any) -> None:
    """To the bit, also where only some rows have logits, or none; and KV is told of after every layer."""
    runner = ModelRunner(
        model_dir=make_folder(3), num_blocks=20, max_model_len=64, layer_group=1, dtype="bfloat16", quantize=quantize
    )
    pool, found, heard = runner.pools.tensors[0], [], list[tuple[int, int]]()
    tokens = [7 * place % 500 for place in range(41)]
    before = StepBatch(tokens[:30], list(range(30)), [SeqSlice(20, 20, ([3, 5],)), SeqSlice(10, 10, ([1],))], [])
    after = StepBatch(
        tokens, [10, 11, *range(20, 39), *range(20)],
        [SeqSlice(1, 11, ([1],)), SeqSlice(1, 12, ([9],)), SeqSlice(19, 39, ([3, 5, 2],)), SeqSlice(20, 20, ([4, 6],))],
        [0, 1, 20],
    )  # fmt: skip
    for is_joined in (True, False):
        if not is_joined:
            runner._decoder._joined = None
        pool.zero_()
        heard.clear()
        assert runner.forward(before, lambda *layers: heard.append(layers)).shape == (0, 512)
        found.append((runner.forward(after), pool.clone()))
        assert heard == [(0, 1), (1, 2)]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].any()


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
