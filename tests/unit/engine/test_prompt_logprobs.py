"""Log-probabilities of prompts: the oracle's, each once, also if cached, preempted, forced or in the same step."""

from collections import defaultdict

import pytest

from tandem.core.handoff import ChoiceState, TokenLogprob
from tandem.core.ids import ChoiceIndex
from tandem.core.ledger import Holder, HoldKind
from tandem.core.sampling import SamplingParams
from tandem.engine import engine as engine_module
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest, RequestKind, StepResult
from tests.unit.engine.arithmetic import cached_blocks
from tests.unit.engine.simulation import (
    ROOT,
    VOCAB,
    expected_prompt_logprobs,
    layout,
    new_engine,
    new_runner,
    oracle,
    prompt_of,
)

GREEDY = {"temperature": 0.0, "max_tokens": 8}


def ask(key: str, length: int, count: int | None = 2, **options: object) -> EngineRequest:
    kind = options.pop("kind", RequestKind.FULL)
    forced = options.pop("forced", ())
    arrival_s = options.pop("arrival_s", 0.0)
    params = SamplingParams(**{**GREEDY, **options}, prompt_logprobs=count)  # type: ignore[arg-type]
    return EngineRequest(
        key=key, prompt=prompt_of(length), sampling=params, hash_root=ROOT, kind=kind, forced=forced,  # type: ignore[arg-type]
        arrival_s=arrival_s,  # type: ignore[arg-type]
    )  # fmt: skip


class Listener:
    """Runs an engine and collects its output."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scores: dict[str, list[TokenLogprob]] = defaultdict(list)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.preempted: list[str] = []

    def step(self) -> StepResult:
        result = self.engine.step()
        self.engine.scheduler.check_integrity()
        assert not result.failed
        for part in result.prompt_logprobs:
            assert part.position == 1 + len(self.scores[part.key]), "each position once, in order"
            assert part.key not in self.tokens, "before the first token"
            self.scores[part.key] += part.logprobs
        for output in result.outputs:
            if output.choice == 0:
                self.tokens[output.key].append(output.token)
        self.preempted += result.preempted
        return result

    def run(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            self.step()

    def check(self, request: EngineRequest) -> None:
        assert self.scores[request.key] == expected(request)
        assert self.tokens[request.key] == oracle(request)


def expected(request: EngineRequest) -> list[TokenLogprob]:
    return expected_prompt_logprobs(request.prompt, VOCAB, request.sampling)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 37])
@pytest.mark.parametrize("chunk", [4, 6, 64])
def test_cold_and_warm(length: int, chunk: int) -> None:
    listener = Listener(new_engine(new_runner(layout()), chunk_tokens=chunk))
    for key in ("cold", "warm"):
        request = ask(key, length)
        listener.run(request)
        listener.check(request)
        assert listener.engine.cached_tokens(key) == 0 if length > 1 else True
    assert len(listener.scores["cold"]) == length - 1


def test_others_still_find_the_blocks() -> None:
    listener = Listener(new_engine(new_runner(layout())))
    listener.run(ask("scored", 37))
    listener.engine.add(ask("plain", 37, None))
    assert listener.step().admitted == {"plain": 36}
    assert not listener.scores["plain"]


def test_beside_others() -> None:
    listener = Listener(new_engine(new_runner(layout()), chunk_tokens=8, max_step_tokens=24))
    requests = [ask(f"r{number}", 9 + 5 * number, number if number % 2 else None) for number in range(6)]
    listener.run(*requests)
    for request in requests:
        if request.sampling.prompt_logprobs is not None:
            listener.check(request)
        else:
            assert not listener.scores[request.key]


def test_a_step_scores_only_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_SCORED_LOGITS", 10 * VOCAB)
    listener = Listener(new_engine(new_runner(layout()), max_step_tokens=200, chunk_tokens=200))
    requests = [ask("a", 50), ask("b", 21), ask("plain", 60, None)]
    for request in requests:
        listener.engine.add(request)
    while listener.engine.has_work:
        result = listener.step()
        assert sum(len(part.logprobs) for part in result.prompt_logprobs) <= 10
    for request in requests[:2]:
        listener.check(request)


@pytest.mark.parametrize("kind", list(RequestKind))
def test_several_choices(kind: RequestKind) -> None:
    listener = Listener(new_engine(new_runner(layout()), chunk_tokens=8))
    request = ask("a", 21, n=3, temperature=1.0, seed=4, kind=kind)
    listener.run(request)
    assert listener.scores["a"] == expected(request)


@pytest.mark.parametrize("forced", [1, 5, 7])
def test_in_a_replay(forced: int) -> None:
    plain = ask("a", 21)
    state = ChoiceState(choice=ChoiceIndex(0), tokens=tuple(oracle(plain)[:forced]))
    listener = Listener(new_engine(new_runner(layout()), chunk_tokens=8))
    listener.run(ask("before", 21))
    request = ask("a", 21, forced=(state,))
    listener.run(request)
    listener.check(request)


def test_preempted_in_the_middle_of_the_prompt() -> None:
    """The old request takes the young one's blocks while that computes its prompt."""
    listener = Listener(new_engine(new_runner(layout(), num_blocks=10), chunk_tokens=4, max_step_tokens=8))
    old, young = ask("old", 8, None, max_tokens=28), ask("young", 25, max_tokens=3, arrival_s=1.0)
    listener.engine.add(old)
    listener.step()
    listener.engine.add(young)
    while "young" not in listener.preempted:
        listener.step()
    assert 0 < len(listener.scores["young"]) < 24
    listener.run()
    assert listener.scores["young"] == expected(young)
    assert listener.tokens["young"] == oracle(young)


def test_whoever_takes_over_a_prompt_says_nothing_of_it() -> None:
    listener = Listener(new_engine(new_runner(layout())))
    request = ask("a", 9)
    listener.run(ask("before", 9))
    holder = Holder(HoldKind.RESERVED, "a/1")
    tables = []
    for ledger in listener.engine.ledgers:
        blocks = cached_blocks(listener.engine, ROOT, request.prompt, ledger.group)
        ledger.share(holder, blocks)
        new = ledger.allocate(holder, 1)
        assert new is not None
        tables.append([*blocks, *new])
    first = ChoiceState(choice=ChoiceIndex(0), tokens=(oracle(request)[0],))
    listener.engine.add_prefilled(request, holder, tuple(tables), (first,))
    while listener.engine.has_work:
        listener.step()
    assert listener.scores["a"] == []
