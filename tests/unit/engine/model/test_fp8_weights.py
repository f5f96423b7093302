"""FP8 weights with a scale a block: the same logits as from the plain numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.engine.model_config import read_model_config
from tandem.engine.runner import ModelRunner
from tandem.engine.weights import Parameter, TensorPart, TensorSplit, load_weights

BLOCKS = (24, 40)


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 numbers of a matrix and the scales of its blocks."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCKS, strict=True))
    padded = torch.zeros(rows * BLOCKS[0], columns * BLOCKS[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, BLOCKS[0], columns, BLOCKS[1]).abs().amax((1, 3)) / 448
    return (weight / spread(scales, weight)).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, like: Tensor) -> Tensor:
    wide = scales.repeat_interleave(BLOCKS[0], 0).repeat_interleave(BLOCKS[1], 1)
    return wide[: like.shape[0], : like.shape[1]]


@pytest.fixture(scope="module")
def folders(model_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A DeepSeek model with FP8 products, and one with the values of these numbers. The first has a layer to predict a
    second token, too."""
    fp8, plain = tmp_path_factory.mktemp("fp8"), tmp_path_factory.mktemp("plain")
    source = model_folder("deepseek_v3")
    config = json.loads((source / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCKS)}
    config |= {"quantization_config": method, "num_nextn_predict_layers": 1}
    (fp8 / "config.json").write_text(json.dumps(config))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        meant[name] = stored[name] = tensor
        if "_proj" in name:
            stored[name], stored[name + "_scale_inv"] = numbers, scales = packed(tensor)
            meant[name] = numbers.float() * spread(scales, tensor)
    stored[f"model.layers.{config['num_hidden_layers']}.embed_tokens.weight"] = torch.ones(2, 2)
    save_file(stored, fp8 / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    return fp8, plain


def test_logits_are_those_of_the_numbers_that_are_meant(
    folders: Any, reference_of: Any, tokens_of: Any, driver_of: Any
) -> None:
    fp8, plain = folders
    tokens = tokens_of(100, 512)
    runner = ModelRunner(model_dir=fp8, dtype="float32", num_blocks=20, max_model_len=128)
    got = driver_of(runner).chunked("a", tokens, 32)
    torch.testing.assert_close(got, reference_of(plain, tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("split", [TensorSplit.WHOLE, TensorSplit.ROWS, TensorSplit.COLUMNS])
def test_ranks_read_their_slices_of_numbers_and_scales(split: TensorSplit, tmp_path: Path) -> None:
    numbers, scales = packed(torch.randn(60, 100, generator=torch.Generator().manual_seed(1)))
    save_file({"a": numbers, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    whole, shares = numbers.float() * spread(scales, numbers), []
    for rank in range(2):
        part = Parameter.on_meta(
            (TensorPart(key="a", rows=60),), columns=100, split=split, dtype=torch.float32, tp_size=2
        )  # fmt: skip
        load_weights(tmp_path, [part], tp_rank=rank, tp_size=2, scale_blocks=BLOCKS)
        shares.append(part.tensor)
    if split is TensorSplit.WHOLE:
        assert torch.equal(shares[0], whole)
        return
    assert torch.equal(torch.cat(shares, 0 if split is TensorSplit.ROWS else 1), whole)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    numbers, scales = packed(torch.ones(60, 100))
    part = Parameter.on_meta((TensorPart(key="a", rows=60),), columns=100, dtype=torch.float32)
    save_file({"a": numbers, "a_scale_inv": scales[:2].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"a in .* cannot be unpacked"):
        load_weights(tmp_path, [part], scale_blocks=BLOCKS)
    save_file({"a": numbers}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        load_weights(tmp_path, [part], scale_blocks=BLOCKS)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"weight_block_size": None}, "weight_block_size is None"), ({"fmt": "e5m2"}, "format e5m2"),
        ({"quant_method": "awq"}, r"quantized weights \(awq\) are not supported"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_by_name(changes: dict[str, Any], complaint: str, folders: Any, tmp_path: Path) -> None:
    raw = json.loads((folders[0] / "config.json").read_text())
    raw["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=complaint):
        read_model_config(tmp_path)
