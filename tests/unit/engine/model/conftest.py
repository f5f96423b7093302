"""Models to run, runners of them and references, each made once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.runner import ModelRunner
from tests.unit.engine.model.driver import ROOT, Reference, compute_reference, random_tokens, tool


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of "bundled" or of a random tiny model of a family, "llama-biases" among them, made once."""
    made: dict[str, Path] = {"bundled": ROOT / "models" / "tandem-tiny"}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            shape = {"family": name.removesuffix("-biases"), "has_biases": name.endswith("-biases")}
            tool.make_random_model(tool.RandomModel(heads=4, kv_heads=2, seed=3, **shape), made[name])
        return made[name]

    return folder


@pytest.fixture(scope="session")
def reference(model_folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    """transformers' answer for 600 random tokens, computed once a model; a prefix of it is the answer for a prefix."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            vocab = json.loads((model_folder(name) / "config.json").read_text())["vocab_size"]
            made[name] = compute_reference(model_folder(name), random_tokens(600, vocab))
        return made[name]

    return get


@pytest.fixture(scope="session")
def fp32_runner(model_folder: Callable[[str], Path]) -> Callable[[str], ModelRunner]:
    """A runner of each model in fp32, made once; blocks are the Driver's, so tests do not disturb each other."""
    made: dict[str, ModelRunner] = {}

    def get(name: str) -> ModelRunner:
        if name not in made:
            made[name] = ModelRunner(
                model_dir=model_folder(name), dtype="float32", num_blocks=160, max_model_len=1024, layer_group=2
            )
        return made[name]

    return get


@pytest.fixture
def raw_config() -> dict[str, Any]:
    """A complete Llama config.json, small."""
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "torch_dtype": "float32",
        "eos_token_id": 1,
    }  # fmt: skip


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes config.json into a fresh folder and returns the folder."""

    def write(config: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write
