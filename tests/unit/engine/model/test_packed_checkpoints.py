"""A model with packed products computes the logits of the numbers that are meant, in every form of `make proof`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proof.checkpoints.packers import CHECKPOINTS
from tandem.engine.runner import ModelRunner
from tests.unit.engine.model.driver import Driver, compute_reference, random_tokens, tool


@pytest.fixture(params=CHECKPOINTS)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A Llama with packed products, and one with the values of these numbers."""
    chosen, (source, packed, plain) = (
        CHECKPOINTS[request.param],
        [tmp_path / name for name in ("of", "packed", "plain")],
    )
    tool.make_random_model(tool.RandomModel(family="llama", hidden=128, intermediate=192, heads=4, kv_heads=2), source)
    config = json.loads((source / "config.json").read_text())
    for folder, more in ((packed, {"quantization_config": chosen.quantization_config}), (plain, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **more}))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            meant[name] = stored[name] = tensor
            continue
        parts, meant[name] = chosen.pack(tensor.float())
        stored |= {name.removesuffix("weight") + part: one.contiguous() for part, one in parts.items()}
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file({name: one.contiguous() for name, one in meant.items()}, plain / "model.safetensors", {"format": "pt"})
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
