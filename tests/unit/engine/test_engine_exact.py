"""Test that greedy tokens and log-probabilities are those of transformers in fp32."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.core.handoff import ChoiceState, TokenLogprob
from tandem.core.ids import BlockId, ChoiceIndex, GroupId
from tandem.core.ledger import Holder, HoldKind
from tandem.engine.engine import Engine
from tandem.engine.request import RequestKind
from tests.unit.engine.bundled import ANSWER, MODEL, prompt_of, request, run

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


def agree(got: list[int], wanted: list[int]) -> None:
    assert len(wanted) > 3, "the model is never sure: choose other prompts"
    assert got[: len(wanted)] == wanted


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_chunks(chunk: int, oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(chunk_tokens=chunk, max_step_tokens=max(chunk, 64))
    answers = run(engine, *(request(f"{length}", prompt_of(length)) for length in (33, 150)))
    for length in (33, 150):
        agree(answers.tokens(f"{length}"), oracle.answer(prompt_of(length)))


def test_prefix_hits(oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    base = prompt_of(100)
    prompts = {"first": base, "again": base, "longer": base + prompt_of(9, 5), "branch": base[:70] + prompt_of(30, 6)}
    for key, prompt in prompts.items():
        engine.add(request(key, prompt))
        hits = engine.step().admitted[key]
        assert hits == {"first": 0, "again": 96, "longer": 96, "branch": 64}[key]
        run(engine)
        warm = run(engine, request(f"{key}-warm", prompt))
        agree(warm.tokens(f"{key}-warm"), oracle.answer(prompt))


def test_eight_at_once(oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    answers = run(new_engine(max_step_tokens=96), *(request(f"{length}", prompt_of(length)) for length in LENGTHS))
    for length in LENGTHS:
        agree(answers.tokens(f"{length}"), oracle.answer(prompt_of(length)))


def test_three_choices(oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    answers = run(new_engine(), request("a", prompt_of(47), n=3))
    for choice in range(3):
        agree(answers.tokens("a", choice), oracle.answer(prompt_of(47)))


def test_three_random_choices_are_those_of_three_alone(new_engine: Callable[..., Engine]) -> None:
    asked = request("a", prompt_of(47), n=3, temperature=0.8, top_p=0.95, seed=7)
    together = run(new_engine(), asked, *(request(f"{length}", prompt_of(length)) for length in LENGTHS[:4]))
    alone = run(new_engine(), asked)
    single = [alone.tokens("a", choice) for choice in range(3)]
    assert [together.tokens("a", choice) for choice in range(3)] == single
    assert len(set(map(tuple, single))) == 3


def test_preempted(oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    prompts = {f"{length}": prompt_of(length) for length in (33, 47, 64)}
    asked = [request(key, prompt) for key, prompt in prompts.items()]
    answers = run(new_engine(num_blocks=14), *asked, request("n", prompt_of(16), n=2))
    assert answers.preempted
    for key, prompt in prompts.items():
        agree(answers.tokens(key), oracle.answer(prompt))
    for choice in range(2):
        agree(answers.tokens("n", choice), oracle.answer(prompt_of(16)))


@pytest.mark.parametrize("length", [33, 64])
def test_prefilled_elsewhere(length: int, oracle: Oracle, new_engine: Callable[..., Engine]) -> None:
    sender, receiver = new_engine(num_blocks=200), new_engine(num_blocks=60)
    prompt = prompt_of(length)
    first = run(sender, request("a", prompt, kind=RequestKind.PREFILL_ONLY)).tokens("a")
    holder = Holder(HoldKind.RESERVED, "a/1")
    source = sender.block_table("a", GroupId(0))
    target: list[BlockId] | None = receiver.ledgers[0].allocate(holder, len(source))
    assert target is not None
    pools = [engine._runner.pools.tensors[0] for engine in (sender, receiver)]  # type: ignore[attr-defined]
    pools[1][target] = pools[0][source]
    sender.cancel("a")
    choice = ChoiceState(choice=ChoiceIndex(0), tokens=tuple(first))
    receiver.add_prefilled(request("a", prompt), holder, (target,), (choice,))
    answers = run(receiver)
    agree(first + answers.tokens("a"), oracle.answer(prompt))


COUNT = 4
CLOSE = 2e-4


@pytest.fixture(scope="module")
def reference() -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Log-probabilities [tokens, vocab] behind every token of a prompt, computed at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(Path(MODEL), dtype=torch.float32, attn_implementation="eager")

    def compute(prompt: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
        return logits.log_softmax(-1)

    return compute


def check(got: list[TokenLogprob], prompt: tuple[int, ...], wanted: torch.Tensor) -> None:
    assert [each.token for each in got] == list(prompt[1:])
    for each, row in zip(got, wanted, strict=False):
        assert each.logprob == pytest.approx(float(row[each.token]), abs=CLOSE)
        above = int((row > row[each.token] + CLOSE).sum())
        close = int(((row - row[each.token]).abs() <= CLOSE).sum())
        assert above + 1 <= each.rank <= above + close
        assert [value for _, value in each.top] == pytest.approx(row.topk(COUNT).values.tolist(), abs=CLOSE)
        for token, value in each.top:
            assert value == pytest.approx(float(row[token]), abs=CLOSE)


@pytest.mark.parametrize("chunk", [16, 48, 512])
def test_as_in_transformers(
    chunk: int, reference: Callable[[tuple[int, ...]], torch.Tensor], new_engine: Callable[..., Engine]
) -> None:
    engine = new_engine(chunk_tokens=chunk, max_step_tokens=max(64, chunk))
    prompts = {f"{length}": prompt_of(length, 3) for length in (2, 17, 64, 150)}
    for name in ("cold", "warm"):
        for key, prompt in prompts.items():
            plain = request(f"{name} {key}", prompt, max_tokens=3, prompt_logprobs=COUNT)
            engine.add(dataclasses.replace(plain, arrival_s=float(len(prompt))))
        engine.add(request(f"{name} beside", prompt_of(90, 4), max_tokens=5))
        scores: dict[str, list[TokenLogprob]] = {}
        while engine.has_work:
            for part in engine.step().prompt_logprobs:
                scores.setdefault(part.key, []).extend(part.logprobs)
        for key, prompt in prompts.items():
            check(scores[f"{name} {key}"], prompt, reference(prompt))
