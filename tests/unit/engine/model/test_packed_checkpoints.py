"""A model with packed products computes the logits of the numbers that are meant."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine.runner import ModelRunner
from tests.unit.engine.checkpoint_formats.packing import awq_words, dense_rows
from tests.unit.engine.model.driver import Driver, compute_reference, random_tokens

GROUP = 32
Packed = tuple[dict[str, Tensor], Tensor]


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [outputs, inputs] from 0 to 15, zeros and fp16 scales [outputs, groups], and what they mean."""
    grouped = weight.view(weight.shape[0], -1, GROUP)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    q = (grouped / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    meant = (q - zeros[:, :, None]) * scales.float()[:, :, None]
    return q.flatten(1).long(), zeros.long(), scales, meant.flatten(1)


def awq(weight: Tensor) -> Packed:
    q, zeros, scales, meant = in_groups(weight)
    return {"qweight": awq_words(q.T), "qzeros": awq_words(zeros.T), "scales": scales.T}, meant


def gptq(weight: Tensor) -> Packed:
    q, zeros, scales, meant = in_groups(weight)
    return {"qweight": dense_rows(q, 4).T, "qzeros": dense_rows(zeros.T - 1, 4), "scales": scales.T}, meant


def packed_ints(weight: Tensor) -> Packed:
    q, zeros, scales, meant = in_groups(weight)
    tensors = {
        "weight_packed": dense_rows(q, 4), "weight_zero_point": dense_rows(zeros.T, 4).T, "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    return tensors, meant


def nf4(weight: Tensor) -> Packed:
    codes = torch.linspace(-1, 1, 16)
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    q = (blocks[:, :, None] / absmax[:, None, None] - codes).abs().argmin(2)
    state = json.dumps({"shape": list(weight.shape), "blocksize": 64}).encode()
    fields = q.view(-1, 2)
    tensors = {
        "weight": (16 * fields[:, 0] + fields[:, 1]).to(torch.uint8)[:, None], "weight.absmax": absmax,
        "weight.quant_map": codes, "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }  # fmt: skip
    return tensors, (codes[q] * absmax[:, None]).view(weight.shape)


def fp8(weight: Tensor) -> Packed:
    scale = weight.abs().amax() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


FORMATS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}),
    "compressed-tensors": (packed_ints, {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False},
        }},
    }),
    "bitsandbytes": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
}  # fmt: skip


@pytest.fixture(params=FORMATS)
def folders(request: pytest.FixtureRequest, model_folder: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A Llama with packed products, and one with the values of these numbers."""
    pack, method = FORMATS[request.param]
    source, packed, plain = model_folder("llama"), tmp_path / "packed", tmp_path / "plain"
    config = json.loads((source / "config.json").read_text())
    for folder, more in ((packed, {"quantization_config": method}), (plain, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **more}))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            meant[name] = stored[name] = tensor
            continue
        parts, meant[name] = pack(tensor.float())
        stored |= {name.removesuffix("weight") + part: one.contiguous() for part, one in parts.items()}
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def test_logits_are_those_of_the_numbers_that_are_meant(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    tokens = random_tokens(100, 512)
    logits = []
    for folder in (packed, plain):
        runner = ModelRunner(model_dir=folder, dtype="float32", num_blocks=20, max_model_len=128)
        logits.append(Driver(runner).chunked("a", tokens, 32))
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[0], compute_reference(plain, tokens).logits, atol=1e-4, rtol=0)


def test_float16_is_computed_as_bfloat16_on_a_cpu_and_quantised(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16", "dtype": "float16"}))
        runner = ModelRunner(model_dir=folder, num_blocks=20, max_model_len=128, quantize="auto")
        assert (runner.dtype, runner.quantize) == ("bfloat16", "int8")
