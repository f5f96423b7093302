"""A driver that plays scheduler, references of transformers, and random models."""

import importlib.util
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.core.ids import BlockId
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch

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
