"""Greedy tokens of the bundled model in fp32 are transformers' own, under any chunks, hits, batches and preemptions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tandem.core.handoff import ChoiceState
from tandem.core.ids import BlockId, ChoiceIndex, GroupId
from tandem.core.ledger import Holder, HoldKind
from tandem.engine.engine import Engine
from tandem.engine.request import RequestKind
from tests.unit.engine.bundled import ANSWER, MODEL, prompt_of, request

LENGTHS = (5, 16, 33, 47, 64, 100, 150, 201)
GAP = 1e-3
"""Between the two best logits: above it, no order of fp32 additions changes the greedy token."""

pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="the bundled model is not here")


class Oracle:
    """transformers' greedy answers, cut where two tokens are too close to distinguish in fp32."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        if prompt not in self._answers:
            self._answers[prompt] = self._greedy(prompt)
        return self._answers[prompt]

    def _greedy(self, prompt: tuple[int, ...]) -> list[int]:
        from transformers import DynamicCache

        tokens: list[int] = []
        with torch.no_grad():
            cache = DynamicCache()  # given by place: its name changes in transformers 5.24
            output = self._model(torch.tensor([prompt]), None, None, cache, use_cache=True)
            while len(tokens) < ANSWER:
                best = output.logits[0, -1].topk(2)
                if float(best.values[0] - best.values[1]) < GAP:
                    break
                tokens.append(int(best.indices[0]))
                output = self._model(torch.tensor([tokens[-1:]]), None, None, cache, use_cache=True)
        return tokens


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def run(engine: Engine) -> tuple[dict[str, list[int]], list[str]]:
    """Tokens by key (and "key#choice" for further choices), and the preempted requests."""
    tokens: dict[str, list[int]] = {}
    preempted: list[str] = []
    for _ in range(2000):
        if not engine.has_work:
            break
        result = engine.step()
        assert not result.failed
        preempted += result.preempted
        for output in result.outputs:
            tokens.setdefault(f"{output.key}#{output.choice}" if output.choice else output.key, []).append(output.token)
        engine.check_integrity()
    assert not engine.has_work
    return tokens, preempted


def agree(got: list[int], wanted: list[int]) -> None:
    assert len(wanted) > 3, "the model is never sure: choose other prompts"
    assert got[: len(wanted)] == wanted


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_chunks(chunk: int, oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(chunk_tokens=chunk, max_step_tokens=max(chunk, 64))
    for length in (33, 150):
        engine.add(request(f"{length}", prompt_of(length)))
    tokens, _ = run(engine)
    for length in (33, 150):
        agree(tokens[f"{length}"], oracle.answer(prompt_of(length)))


def test_prefix_hits(oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    base = prompt_of(100)
    prompts = {"first": base, "again": base, "longer": base + prompt_of(9, 5), "branch": base[:70] + prompt_of(30, 6)}
    for key, prompt in prompts.items():
        engine.add(request(key, prompt))
        hits = engine.step().admitted[key]
        assert hits == {"first": 0, "again": 96, "longer": 96, "branch": 64}[key]
        tokens, _ = run(engine)
        engine.add(request(f"{key}-warm", prompt))
        tokens, _ = run(engine)
        agree(tokens[f"{key}-warm"], oracle.answer(prompt))


def test_eight_at_once(oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(max_step_tokens=96)
    for length in LENGTHS:
        engine.add(request(f"{length}", prompt_of(length)))
    tokens, _ = run(engine)
    for length in LENGTHS:
        agree(tokens[f"{length}"], oracle.answer(prompt_of(length)))


def test_three_choices(oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    engine.add(request("a", prompt_of(47), n=3))
    tokens, _ = run(engine)
    for key in ("a", "a#1", "a#2"):
        agree(tokens[key], oracle.answer(prompt_of(47)))


def test_three_random_choices_are_those_of_three_alone(new_engine: Callable[..., Engine]) -> None:
    options = {"n": 3, "temperature": 0.8, "top_p": 0.95, "seed": 7}
    together = new_engine()
    together.add(request("a", prompt_of(47), **options))
    for length in LENGTHS[:4]:
        together.add(request(f"{length}", prompt_of(length)))
    tokens, _ = run(together)
    alone = new_engine()
    alone.add(request("a", prompt_of(47), **options))
    single, _ = run(alone)
    assert {key: tokens[key] for key in single} == single
    assert len({tuple(answer) for answer in single.values()}) == 3


def test_preempted(oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(num_blocks=14)
    for length in (33, 47, 64):
        engine.add(request(f"{length}", prompt_of(length)))
    engine.add(request("n", prompt_of(16), n=2))
    tokens, preempted = run(engine)
    assert preempted
    for length in (33, 47, 64):
        agree(tokens[f"{length}"], oracle.answer(prompt_of(length)))
    for key in ("n", "n#1"):
        agree(tokens[key], oracle.answer(prompt_of(16)))


@pytest.mark.parametrize("length", [33, 64])
def test_prefilled_elsewhere(length: int, oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    sender, receiver = new_engine(num_blocks=200), new_engine(num_blocks=60)
    prompt = prompt_of(length)
    sender.add(request("a", prompt, kind=RequestKind.PREFILL_ONLY))
    first, _ = run(sender)
    holder = Holder(HoldKind.RESERVED, "a/1")
    source = sender.block_table("a", GroupId(0))
    target: list[BlockId] | None = receiver.ledgers[0].allocate(holder, len(source))
    assert target is not None
    pools = [engine._runner.pools.tensors[0] for engine in (sender, receiver)]  # type: ignore[attr-defined]
    pools[1][target] = pools[0][source]
    sender.release("a")
    choice = ChoiceState(choice=ChoiceIndex(0), tokens=tuple(first["a"]))
    receiver.add_prefilled(request("a", prompt), holder, (target,), (choice,))
    tokens, _ = run(receiver)
    agree(first["a"] + tokens["a"], oracle.answer(prompt))
