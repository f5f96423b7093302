"""Models split over 2, 3, 4 and 8 processes compute what one process does, and what transformers does.

The steps: prompt A at once; prompt B in chunks; C behind A's first blocks, one of them copied; two prompts in one step;
a chunk that wants no logits; decodes beside a chunk; then greedy tokens. Block tables are shuffled.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.integration.engine.tp_program import play
from tests.plugins.drawn import some_of

if TYPE_CHECKING:
    from tests.integration.engine.conftest import Ranks

ROOT = Path(__file__).resolve().parents[3]
SIZES = (2, *some_of((4, 8), 1, "sizes of groups"))
BLOCK_TOKENS, NUM_BLOCKS = 8, 64
CLOSE = 1e-4
QUANTISED = {"int8": 0.04, "w8a8": 0.04, "int4": 0.35}
"""And how far from fp32's half of their tokens' logits may be, as a share of their norm."""
OF_QUANTISED = (
    ("odd vocabulary", "int8"), ("odd vocabulary", "int4"), ("experts", "int4"), ("sinks", "int8"), ("experts", "w8a8"),
)  # fmt: skip
CLEAR = 1e-3
"""Greedy tokens must be equal where the best logit is this far ahead of the second."""


@dataclass
class Steps:
    """Writes the steps of a case: sequences over shuffled blocks, tokens drawn from a seed."""

    vocab: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    said: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    wanted: list[list[tuple[str, int]]] = field(default_factory=list)
    """For every step, the sequence and position of each row of logits."""

    def __post_init__(self) -> None:
        self._random = random.Random(5)
        self._free = list(range(NUM_BLOCKS))
        self._random.shuffle(self._free)

    def step(self, work: dict[str, int], *, is_sampled: bool = False, has_rows: bool = True) -> None:
        """Append `work[name]` random tokens to each sequence, single tokens first."""
        step: dict[str, Any] = {"tokens": [], "positions": [], "sequences": [], "rows": [], "is_sampled": is_sampled}
        wanted: list[tuple[str, int]] = []
        for name in sorted(work, key=lambda name: work[name] != 1):
            said = self.said.setdefault(name, [])
            start, end = len(said), len(said) + work[name]
            said += [self._random.randrange(self.vocab) for _ in range(work[name])]
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK_TOKENS < end:
                table.append(self._free.pop())
            step["tokens"] += said[start:end]
            step["positions"] += range(start, end)
            step["sequences"].append({"query": work[name], "context": end, "table": list(table)})
            wanted += [(name, position) for position in range(start, end)]
        step["rows"] = list(range(len(wanted))) if has_rows else []
        self.steps.append(step)
        self.wanted.append(wanted if has_rows else [])

    def share(self, name: str, source: str, blocks: int) -> None:
        """`name` begins with the first `blocks` of `source`; the last of them is copied, not shared."""
        self.said[name] = self.said[source][: blocks * BLOCK_TOKENS]
        own = self._free.pop()
        self.tables[name] = [*self.tables[source][: blocks - 1], own]
        self._copies = [(self.tables[source][blocks - 1], own)]

    def copy_before_last(self) -> None:
        self.steps[-1]["copies"] = self._copies


def plan(vocab: int) -> Steps:
    steps = Steps(vocab)
    steps.step({"a": 75})
    for chunk in (13, 8, 40):
        steps.step({"b": chunk})
    steps.share("c", "a", 4)
    steps.step({"c": 21})
    steps.copy_before_last()
    steps.step({"d": 5, "e": 30})
    steps.step({"d": 17}, has_rows=False)
    for _ in range(3):
        steps.step({"a": 1, "b": 1, "c": 1, "e": 11})
    for _ in range(3):
        steps.step({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, is_sampled=True)
    return steps


MODELS: dict[str, dict[str, Any]] = {
    "replicated": {"family": "qwen2", "heads": 8, "kv_heads": 2, "is_tied": True, "vocab": 512},
    "odd vocabulary": {"family": "llama", "heads": 8, "kv_heads": 4, "head_dim": 16, "vocab": 509},
    "all heads": {"family": "qwen3", "heads": 8, "kv_heads": 8, "head_dim": 16, "vocab": 511},
    "window": {"family": "mistral", "heads": 8, "kv_heads": 4, "vocab": 512, "window": 20},
    "alternating windows": {"family": "gemma2", "heads": 8, "kv_heads": 2, "vocab": 511, "window": 20},
    "two rotations": {"family": "gemma3", "heads": 8, "kv_heads": 8, "head_dim": 16, "vocab": 512, "window": 20},
    "experts": {"family": "mixtral", "heads": 8, "kv_heads": 2, "vocab": 512},
    "many experts": {
        "family": "qwen3_moe", "heads": 8, "kv_heads": 4, "vocab": 512, "experts": 16, "experts_per_token": 4,
        "expert_intermediate": 32,
    },
    "sinks": {"family": "gpt_oss", "heads": 8, "kv_heads": 2, "vocab": 512, "window": 20},
    "latent": {"family": "deepseek_v2", "heads": 8, "kv_heads": 1, "vocab": 511},
    "queries of a latent": {"family": "deepseek_v3", "heads": 8, "kv_heads": 1, "vocab": 512},
    "biases": {"family": "llama", "heads": 8, "kv_heads": 1, "vocab": 9, "seed": 6},
}  # fmt: skip
THIRDS: dict[str, dict[str, Any]] = {
    "thirds": {"family": "llama", "heads": 9, "kv_heads": 3, "hidden": 72, "vocab": 511},
    "thirds of experts": {"family": "mixtral", "heads": 9, "kv_heads": 3, "hidden": 72, "vocab": 512},
}
"""For three ranks, which share heads that no other number of ranks can."""
SHAPES = {**MODELS, **THIRDS}
PAIRS = [*((name, size) for name in MODELS for size in SIZES), *((name, 3) for name in THIRDS)]


@dataclass(frozen=True)
class Played:
    """A model's steps and what came of them: `alone` in this process, `ranks[size]` one dictionary a rank."""

    folder: Path
    steps: Steps
    alone: dict[str, Tensor]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    found = {}
    for name, shape in SHAPES.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        _tool().make_random_model(_tool().RandomModel(intermediate=96, layers=2, **{"hidden": 64, **shape}), folder)
        if name == "biases":
            _add_biases(folder)
        steps = plan(shape["vocab"])
        found[name] = Played(folder, steps, play(_case(folder, steps)))
    return found


@pytest.fixture(scope="module")
def of_ranks(
    played: dict[str, Played], tmp_path_factory: pytest.TempPathFactory, start_ranks: Callable[..., Ranks]
) -> Callable[[int], dict[str, list[dict[str, Tensor]]]]:
    """Return the results of every rank of a size, by case; each size runs once, all its cases in the same processes."""
    made: dict[int, dict[str, list[dict[str, Tensor]]]] = {}

    def get(size: int) -> dict[str, list[dict[str, Tensor]]]:
        if size not in made:
            folder = tmp_path_factory.mktemp(f"tp{size}")
            names = THIRDS if size == 3 else MODELS
            cases = {name: _case(played[name].folder, played[name].steps) for name in names}
            if size != 3:
                add_variants(cases)
            (folder / "cases.json").write_text(json.dumps(cases))
            start_ranks(folder, size, "cases").wait()
            made[size] = {
                name: [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(size)] for name in cases
            }
        return made[size]

    def add_variants(cases: dict[str, dict[str, Any]]) -> None:
        plain = played["odd vocabulary"]
        for dtype in ("float32", "bfloat16"):
            options = {"is_deterministic": True, "dtype": dtype}
            cases[f"deterministic {dtype}"] = _case(plain.folder, plain.steps, **options)
            cases[f"deterministic {dtype}, other steps"] = _case(plain.folder, _one_by_one(plain.steps), **options)
        cases["kv in bfloat16"] = _case(plain.folder, plain.steps, kv_dtype="bfloat16")
        for name, kind in OF_QUANTISED:
            cases[f"{kind} of {name}"] = _case(played[name].folder, played[name].steps, quantize=kind)
        cases["unequal"] = _case(plain.folder, Steps(1))
        cases["unequal"]["options_of_rank"] = {"1": {"num_blocks": NUM_BLOCKS - 3}}

    return get


@pytest.mark.parametrize(("name", "size"), PAIRS)
def test_logits_and_tokens_are_those_of_one_process(name: str, size: int, played: Any, of_ranks: Any) -> None:
    alone, ranks, steps = played[name].alone, of_ranks(size)[name], played[name].steps
    for number, step in enumerate(steps.steps):
        if step["is_sampled"]:
            assert torch.equal(ranks[0][f"tokens {number}"], alone[f"tokens {number}"])
            assert all(not rank[f"tokens {number}"].numel() for rank in ranks[1:])
            continue
        torch.testing.assert_close(ranks[0][f"logits {number}"], alone[f"logits {number}"], atol=CLOSE, rtol=0)
        assert all(rank[f"logits {number}"].shape == (0, steps.vocab) for rank in ranks[1:])


@pytest.mark.parametrize(("name", "size"), PAIRS)
def test_logits_are_those_of_transformers(name: str, size: int, played: Any, of_ranks: Any) -> None:
    found, steps = of_ranks(size)[name][0], played[name].steps
    expected = {each: _reference(played[name].folder, tokens) for each, tokens in steps.said.items()}
    for number, (step, wanted) in enumerate(zip(steps.steps, steps.wanted, strict=True)):
        if not wanted:
            continue
        rows = torch.stack([expected[each][position] for each, position in wanted])
        if not step["is_sampled"]:
            torch.testing.assert_close(found[f"logits {number}"], rows, atol=CLOSE, rtol=0)
            continue
        best, place = rows.topk(2, -1)
        clear = best[:, 0] - best[:, 1] > CLEAR
        assert clear.any()
        assert torch.equal(found[f"tokens {number}"][clear], place[clear, 0])


@pytest.mark.parametrize(("name", "size"), PAIRS)
def test_every_rank_stores_its_heads(name: str, size: int, played: Any, of_ranks: Any) -> None:
    whole, heads = played[name].alone["pool"], SHAPES[name]["kv_heads"]
    for rank, found in enumerate(of_ranks(size)[name]):
        local = max(1, heads // size)
        first = rank * heads // size
        torch.testing.assert_close(found["pool"], whole[:, :, :, first : first + local], atol=CLOSE, rtol=0)
        assert found["pool"].shape[3] == local


@pytest.mark.parametrize("size", SIZES)
def test_ranks_with_the_same_heads_store_the_same_bits(size: int, of_ranks: Any) -> None:
    ranks = of_ranks(size)["biases"]
    assert all(torch.equal(rank["pool"], ranks[0]["pool"]) for rank in ranks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_deterministic_ranks_do_not_depend_on_batch_or_chunks(
    size: int, dtype: str, played: Any, of_ranks: Any
) -> None:
    steps, found = played["odd vocabulary"].steps, of_ranks(size)
    whole, single = found[f"deterministic {dtype}"], found[f"deterministic {dtype}, other steps"]
    rows = [whole[0][f"logits {n}"] for n, step in enumerate(steps.steps) if step["rows"] and not step["is_sampled"]]
    assert sum(map(len, rows)) > 0
    other = _one_by_one(steps)
    by_place = {
        wanted: single[0][f"logits {number}"][row]
        for number, places in enumerate(other.wanted)
        for row, wanted in enumerate(places)
    }
    places = [each for step, each in zip(steps.steps, steps.wanted, strict=True) if not step["is_sampled"]]
    expected = torch.stack([by_place[place] for each in places for place in each])
    assert torch.equal(torch.cat(rows), expected)
    blocks = sorted({block for table in steps.tables.values() for block in table})
    for one, rank in zip(whole, single, strict=True):
        assert torch.equal(one["pool"][blocks], rank["pool"][blocks])


@pytest.mark.parametrize("size", SIZES)
def test_ranks_may_store_kv_in_another_dtype(size: int, played: Any, of_ranks: Any) -> None:
    name, expected = "odd vocabulary", played["odd vocabulary"].alone
    heads = MODELS[name]["kv_heads"]
    for rank, found in enumerate(of_ranks(size)["kv in bfloat16"]):
        assert found["pool"].dtype is torch.bfloat16
        first = rank * heads // size
        own = expected["pool"][:, :, :, first : first + max(1, heads // size)]
        torch.testing.assert_close(found["pool"].float(), own, atol=0.05, rtol=0.02)
    found = of_ranks(size)["kv in bfloat16"][0]
    torch.testing.assert_close(found["logits 0"], expected["logits 0"], atol=0.2, rtol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "kind"), OF_QUANTISED)
def test_each_rank_quantises_its_part(name: str, kind: str, size: int, played: Any, of_ranks: Any) -> None:
    """With scales of its own: answers are as near to fp32's as those of one process, and not the same."""
    found, each, errors = of_ranks(size)[f"{kind} of {name}"][0], played[name], []
    for number, step in enumerate(each.steps.steps):
        if step["rows"] and not step["is_sampled"]:
            expected = each.alone[f"logits {number}"]
            errors.append((found[f"logits {number}"] - expected).norm(dim=1) / expected.norm(dim=1))
    assert 0.001 < torch.cat(errors).median() < QUANTISED[kind]


@pytest.mark.parametrize("size", SIZES)
def test_the_smallest_block_count_is_everybodys(size: int, of_ranks: Any) -> None:
    assert all(rank["num_blocks"].tolist() == [NUM_BLOCKS - 3] for rank in of_ranks(size)["unequal"])


def test_a_rank_that_fails_in_a_step_ends_the_others_at_once(
    played: dict[str, Played], tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    """It lives on, so only the aborted group informs the others; the limit of a call is a minute."""
    each = played["replicated"]
    (tmp_path / "cases.json").write_text(json.dumps({"any": _case(each.folder, each.steps)}))
    ranks = start_ranks(tmp_path, 2, "fail", timeout_s=60)
    ranks.wait_ready()
    output = ranks.processes[0].communicate(timeout=20)[0]
    assert "WorkerLostError: rank 0 lost its tensor-parallel group" in output
    assert ranks.processes[1].poll() is None
    assert "own failure: no room for a copy" in ranks.processes[1].communicate(timeout=20)[0]


def _case(folder: Path, steps: Steps, **options: Any) -> dict[str, Any]:
    options = {
        "dtype": "float32", "num_blocks": NUM_BLOCKS, "max_model_len": 256, "block_tokens": BLOCK_TOKENS, **options
    }  # fmt: skip
    return {"folder": str(folder), "options": options, "steps": steps.steps}


def _one_by_one(steps: Steps) -> Steps:
    """The same sequences in the same blocks, in steps of one sequence and 7 tokens; c writes a's blocks once more."""
    other = Steps(steps.vocab, tables=steps.tables, said=steps.said)
    for name, said in steps.said.items():
        for start in range(0, len(said), 7):
            end = min(start + 7, len(said))
            sequence = {"query": end - start, "context": end, "table": steps.tables[name]}
            rows = list(range(end - start))
            other.steps.append({
                "tokens": said[start:end], "positions": list(range(start, end)), "sequences": [sequence], "rows": rows
            })  # fmt: skip
            other.wanted.append([(name, position) for position in range(start, end)])
    return other


def _reference(folder: Path, tokens: list[int]) -> Tensor:
    """transformers' fp32 logits, [T, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def _add_biases(folder: Path) -> None:
    """Biases on every product, those behind the sums of the ranks among them."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(8)
    for key in [key for key in tensors if "_proj.weight" in key]:
        tensors[key.replace("weight", "bias")] = torch.randn(tensors[key].shape[0], generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True, "mlp_bias": True}))


def _tool() -> Any:
    if "random_model" not in sys.modules:
        spec = importlib.util.spec_from_file_location("random_model", ROOT / "tools" / "random_model.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["random_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["random_model"])
    return sys.modules["random_model"]
