"""Test weights in FP8 and MXFP4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.engine.checkpoint_formats.fp8 import Fp8
from tandem.engine.model_config import read_model_config
from tandem.engine.models.gpt_oss_experts import dequantize_mxfp4
from tandem.engine.runner import ModelRunner
from tandem.engine.weights import Parameter, TensorPart, TensorSplit, load_weights
from tests.unit.engine.model.driver import Driver, compute_reference, random_tokens

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


def test_logits_are_those_of_the_numbers_that_are_meant(folders: Any) -> None:
    fp8, plain = folders
    tokens = random_tokens(100, 512)
    runner = ModelRunner(model_dir=fp8, dtype="float32", num_blocks=20, max_model_len=128)
    got = Driver(runner).chunked("a", tokens, 32)
    torch.testing.assert_close(got, compute_reference(plain, tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("split", [TensorSplit.WHOLE, TensorSplit.ROWS, TensorSplit.COLUMNS])
def test_ranks_read_their_slices_of_numbers_and_scales(split: TensorSplit, tmp_path: Path) -> None:
    numbers, scales = packed(torch.randn(60, 100, generator=torch.Generator().manual_seed(1)))
    save_file({"a": numbers, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    whole, shares = numbers.float() * spread(scales, numbers), []
    for rank in range(2):
        part = Parameter.on_meta(
            (TensorPart(key="a", rows=60),), columns=100, split=split, dtype=torch.float32, tp_size=2
        )  # fmt: skip
        load_weights(tmp_path, [part], tp_rank=rank, tp_size=2, stored=Fp8(BLOCKS))
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
        load_weights(tmp_path, [part], stored=Fp8(BLOCKS))
    save_file({"a": numbers}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        load_weights(tmp_path, [part], stored=Fp8(BLOCKS))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]"), ({"fmt": "e5m2"}, "format e5m2"),
        ({"quant_method": "quip"}, r"quantized weights \(quip\) are not supported"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_by_name(changes: dict[str, Any], complaint: str, folders: Any, tmp_path: Path) -> None:
    raw = json.loads((folders[0] / "config.json").read_text())
    raw["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=complaint):
        read_model_config(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_and_every_scale_is_that_of_transformers(dtype: torch.dtype) -> None:
    """All 256 bytes under all 256 scales, the largest and the smallest among them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(2, 256, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 256, 16, 16).contiguous()
    found = dequantize_mxfp4(blocks, scales, dtype)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert (found.shape, found.dtype) == ((2, 256, 512), dtype)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def test_a_group_by_hand() -> None:
    """The lower half of a byte comes first; a scale of 127 is one."""
    blocks = torch.tensor([[[0x21, 0x93] + [0x7F] * 14]], dtype=torch.uint8)
    scales = torch.tensor([[128]], dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, scales, torch.float32)
    assert found.tolist() == [[1.0, 2.0, 3.0, -1.0] + [-12.0, 12.0] * 14]


def test_what_is_no_mxfp4_is_refused() -> None:
    blocks, scales = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(TypeError, match="uint8"):
        dequantize_mxfp4(blocks, scales.float(), torch.float32)
    with pytest.raises(ValueError, match="16 bytes"):
        dequantize_mxfp4(blocks[..., :8], scales, torch.float32)
