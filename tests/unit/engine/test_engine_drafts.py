"""Drafts copied from a prediction, the prompt and the answer change no answer, and save steps where they hold."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.core import metric_names as names
from tandem.core.clock import MonotonicClock
from tandem.core.config import SpeculationMode
from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tests.unit.engine.bundled import MODEL, Answers, prompt_of, request, run

MOST = 60


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cost nothing, so that the time of this machine decides nothing here."""
    monkeypatch.setattr("tandem.engine.draft_controller.DraftController._costs", lambda _: (1.0, 1e-3))


def asked(predict: Callable[[str, int], tuple[int, ...]]) -> list[EngineRequest]:
    """Of many kinds; `predict` gives the prediction for a key and a choice."""
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "greedy": (31, {"logprobs": 3}),
        "random": (40, {"temperature": 1.0, "seed": 3, "top_p": 0.8}),
        "two": (47, {"temperature": 1.0, "n": 2, "seed": 5, "logprobs": 1}),
        "biased": (33, {"logit_bias": ((300, 5.0), (5, -3.0))}),
        "penalty": (35, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}),
        "short": (36, {"max_tokens": 7}),
        "least": (37, {"min_tokens": 9, "ignore_eos": False}),
        "stops": (38, {"stop_token_ids": tuple(range(16, 120)), "ignore_eos": False}),
        "unasked": (39, {"without_drafts": True}),
    }
    return [
        request(key, prompt_of(length), **{"max_tokens": MOST, "prediction": predict(key, 0), **options})
        for key, (length, options) in kinds.items()
    ]


def same(found: Answers, expected: Answers) -> None:
    assert found.outputs.keys() == expected.outputs.keys()
    for place, outputs in expected.outputs.items():
        mine = found.outputs[place]
        assert [one.token for one in mine] == [one.token for one in outputs], place
        assert [one.index for one in mine] == list(range(len(outputs)))
        assert [one.finish for one in mine] == [one.finish for one in outputs]
        for one, other in zip(mine, outputs, strict=True):
            if other.logprob is not None:
                assert one.logprob is not None
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-3)


@pytest.mark.parametrize("limits", [{}, {"draft_rows": 64}, {"draft_rows": 64, "num_blocks": 24}], ids=str)
@pytest.mark.parametrize("speculation", [SpeculationMode.PREDICTION, SpeculationMode.COPY])
def test_drafts_change_no_answer(
    speculation: SpeculationMode, limits: dict[str, int], new_engine: Callable[..., Engine]
) -> None:
    plain = run(new_engine(speculation=SpeculationMode.OFF), *asked(lambda *_: ()))

    def edited(key: str, choice: int) -> tuple[int, ...]:
        """The answer, but for a few tokens that are others, more or left out."""
        tokens = plain.tokens(key, choice)
        return (*tokens[:5], 17, 18, *tokens[5:14], *tokens[16:30], 20, *tokens[31:], 21, 22)

    engine = new_engine(speculation=speculation, **limits)
    answers = run(engine, *asked(edited))
    same(answers, plain)
    assert bool(answers.preempted) is ("num_blocks" in limits)
    counters = engine.scheduler.drafts.controller.counters()
    assert 0 < counters[names.SPEC_ACCEPTED_TOKENS] < counters[names.SPEC_DRAFT_TOKENS]


def test_a_prediction_that_comes_true_saves_steps(new_engine: Callable[..., Engine]) -> None:
    one = request("a", prompt_of(40), max_tokens=64)
    tokens = run(new_engine(), one).tokens("a")
    engine = new_engine()
    engine.add(request("a", prompt_of(40), max_tokens=64, prediction=tuple(tokens)))
    results = []
    while engine.has_work:
        results.append(engine.step())
    assert [output.token for result in results for output in result.outputs] == tokens
    assert len(results) <= 10, "of 64 tokens, 16 at once"


@pytest.mark.parametrize("changes", [{"speculation": SpeculationMode.OFF}, {"draft_rows": 0}], ids=str)
def test_nothing_is_drafted_where_that_is_off(changes: dict[str, Any], new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(**changes)
    tokens = run(engine, request("a", prompt_of(40))).tokens("a")
    assert run(engine, request("b", prompt_of(40), prediction=tuple(tokens))).tokens("b") == tokens
    assert engine.scheduler.drafts.controller.drafts == 0


def test_drafts_that_do_not_hold_leave_the_blocks_as_they_were(new_engine: Callable[..., Engine]) -> None:
    """Blocks behind an answer stay findable and right."""
    engine = new_engine(draft_rows=64)
    plain = run(new_engine(), request("a", prompt_of(33), max_tokens=100)).tokens("a")
    wrong = tuple(token if place % 7 else 17 for place, token in enumerate(plain))
    assert run(engine, request("a", prompt_of(33), max_tokens=100, prediction=wrong)).tokens("a") == plain
    controller = engine.scheduler.drafts.controller
    assert 0 < controller.accepted < controller.drafts
    again = request("b", (*prompt_of(33), *plain[:-1]), max_tokens=20, logprobs=3)
    cached = run(engine, again)
    assert cached.cached >= 33 + len(plain) - 1 - 2 * 16
    assert cached.tokens("b") == run(new_engine(), again).tokens("b")


def test_a_replay_is_drafted_from_its_first_step(new_engine: Callable[..., Engine]) -> None:
    """As behind a hand-off: what was chosen elsewhere is known."""
    plain = tuple(run(new_engine(), request("a", prompt_of(32), max_tokens=40)).tokens("a"))
    engine = new_engine()
    known = ChoiceState(choice=ChoiceIndex(0), tokens=plain[:5])
    engine.add(replace(request("a", prompt_of(32), max_tokens=40, prediction=plain), forced=(known,)))
    results = []
    while engine.has_work:
        results.append([output.token for output in engine.step().outputs])
    assert [token for result in results for token in result] == list(plain[5:])
    assert len(results[1]) == 16, "the first step computes what is known, and the next one has drafts"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_do_not_depend_on_drafts(dtype: str) -> None:
    runner = ModelRunner(model_dir=MODEL, dtype=dtype, num_blocks=100, max_model_len=512, is_deterministic=True)

    def engine(**settings: Any) -> Engine:
        return Engine(runner, config=SchedulerConfig(max_step_s=1e9, **settings), clock=MonotonicClock())

    plain = run(engine(), *asked(lambda *_: ()))
    drafted = engine(draft_rows=64, speculation=SpeculationMode.COPY)
    answers = run(drafted, *asked(lambda key, choice: tuple(plain.tokens(key, choice))))
    assert answers.scored() == plain.scored()
    assert drafted.scheduler.drafts.controller.accepted > 100
