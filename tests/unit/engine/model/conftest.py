"""Models to run and a driver that plays scheduler: it owns block tables and turns prompts into step batches."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.ids import BlockId
from tandem.engine.runner import ModelRunner
from tandem.engine.step_batch import SeqSlice, StepBatch

ROOT = Path(__file__).resolve().parents[4]


def _load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("random_model", ROOT / "tools" / "random_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["random_model"] = module
    spec.loader.exec_module(module)
    return module


tool = _load_tool()


@dataclass
class Driver:
    """Sequences of one runner over shuffled blocks; every method is one step."""

    runner: ModelRunner
    tables: dict[str, list[BlockId]] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = [BlockId(block) for block in range(self.runner.num_blocks[0])]
        random.Random(7).shuffle(self._free)

    def step(self, work: dict[str, list[int]], **options: Any) -> dict[str, Tensor]:
        """Append tokens to sequences, single tokens first as the runner asks; all logits by sequence."""
        order = sorted(work, key=lambda name: len(work[name]) != 1)
        batch = StepBatch([], [], [])
        for name in order:
            start = self.stored.get(name, 0)
            end = start + len(work[name])
            table = self.tables.setdefault(name, [])
            while len(table) < self.runner.layout.groups[0].blocks_for(end):
                table.append(self._free.pop())
            batch.token_ids += work[name]
            batch.positions += range(start, end)
            batch.sequences.append(SeqSlice(end - start, end, (table,)))
            self.stored[name] = end
        batch.logit_rows = list(range(len(batch.token_ids)))
        logits = self.runner.forward(batch, **options)
        parts = logits.split_with_sizes([len(work[name]) for name in order])
        return dict(zip(order, parts, strict=True))

    def chunked(self, name: str, tokens: list[int], chunk: int) -> Tensor:
        """Logits of all `tokens`, computed `chunk` at a time."""
        pieces = [tokens[low : low + chunk] for low in range(0, len(tokens), chunk)]
        return torch.cat([self.step({name: piece})[name] for piece in pieces])

    def stored_kv(self, name: str, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence as the pool holds them: [kv_heads, tokens, head_dim]."""
        blocks = self.runner.pools.layer_views[layer][self.tables[name]]
        flat = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.stored[name]]
        return flat[0], flat[1]


@dataclass(frozen=True)
class Reference:
    """Results of transformers in one forward of `tokens` in fp32: logits [T, vocab] and K and V of each layer."""

    folder: Path
    tokens: list[int]
    logits: Tensor
    kv: list[tuple[Tensor, Tensor]]


def compute_reference(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Reference:
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    cache: Any = DynamicCache()  # that knows no config: it keeps what left a window, too
    with torch.no_grad():  # by place: its name is `past_key_values` before transformers 5.24 and `cache` from then on
        output = model(torch.tensor([tokens]), None, None, cache, use_cache=True)
    kv = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    return Reference(folder, tokens, output.logits[0].float(), kv)


def random_tokens(count: int, vocab: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


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


@pytest.fixture
def driver_of() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def reference_of() -> Callable[..., Reference]:
    return compute_reference


@pytest.fixture(scope="session")
def tokens_of() -> Callable[..., list[int]]:
    return random_tokens


@pytest.fixture(scope="session")
def random_model_tool() -> Any:
    return tool
