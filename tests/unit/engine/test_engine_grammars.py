"""An engine on the bundled model follows grammars: with others, in choices, after preemption and in another engine."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jsonschema_rs
import orjson
import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.core import metric_names as names
from tandem.core.clock import MonotonicClock
from tandem.core.errors import InvalidGrammarError
from tandem.core.handoff import ChoiceState
from tandem.core.ids import BlockId, ChoiceIndex, GroupId
from tandem.core.ledger import Holder, HoldKind
from tandem.core.output_grammar import SPACING, OutputGrammar
from tandem.core.state_enums import FinishReason
from tandem.engine.engine import Engine
from tandem.engine.output_grammars import CompiledGrammar, OutputGrammars, load_tokenizer
from tandem.engine.request import EngineRequest, RequestKind
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tests.unit.engine.bundled import MODEL, prompt_of, request, run

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
TOKENIZER = LLTokenizer(str(MODEL / "tokenizer.json"), eos_token=[1])
PATIENCE_S = 10.0
"""Tests run beside others: no mask is late, unless one is to be."""
RANDOM = {"temperature": 1.0, "seed": 5, "max_tokens": 80, "ignore_eos": False}


@pytest.fixture(scope="module")
def grammars() -> Iterator[OutputGrammars]:
    made = OutputGrammars(lambda: load_tokenizer(MODEL, 4096, (1,)), PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def guided_engine(new_engine: Callable[..., Engine], grammars: OutputGrammars) -> Callable[..., Engine]:
    return lambda **config: new_engine(grammars=grammars, **config)


def guided(key: str, length: int = 33, **options: Any) -> EngineRequest:
    return request(key, prompt_of(length), **{**RANDOM, "grammar": GRAMMAR, **options})


def check(tokens: list[int]) -> None:
    """A whole document that ends with the end of sequence."""
    assert tokens[-1] == 1
    jsonschema_rs.validate(SCHEMA, json.loads(TOKENIZER.decode_str(tokens[:-1])))


def test_answers_validate_and_end(guided_engine: Callable[..., Engine]) -> None:
    answers = run(guided_engine(), *(guided(f"{seed}", seed=seed) for seed in range(6)), guided("n", n=3))
    for (key, choice), outputs in answers.outputs.items():
        assert outputs[-1].finish is FinishReason.STOP
        check(answers.tokens(key, choice))
    assert len({tuple(answers.tokens("n", choice)) for choice in range(3)}) > 1


def test_requests_without_a_grammar_are_the_same_beside_those_with_one(guided_engine: Callable[..., Engine]) -> None:
    free = request("free", prompt_of(47), logprobs=2, max_tokens=40)
    alone = run(guided_engine(), free).scored()
    beside = run(guided_engine(), guided("a"), free).scored()
    assert [token for token, _ in beside["free", 0]] == [token for token, _ in alone["free", 0]]


def test_length_cuts_an_answer_off(guided_engine: Callable[..., Engine]) -> None:
    outputs = run(guided_engine(), guided("a", max_tokens=4)).outputs["a", 0]
    assert [output.finish for output in outputs] == [None, None, None, FinishReason.LENGTH]


def test_ignore_eos_ends_with_the_grammar(guided_engine: Callable[..., Engine]) -> None:
    check(run(guided_engine(), guided("a", ignore_eos=True)).tokens("a"))


def test_min_tokens_gives_way_to_a_complete_grammar(guided_engine: Callable[..., Engine]) -> None:
    outputs = run(guided_engine(), guided("a", grammar='start: "yes" | "no"', min_tokens=60)).outputs["a", 0]
    assert outputs[-1].finish is FinishReason.STOP
    assert TOKENIZER.decode_str([output.token for output in outputs[:-1]]) in ("yes", "no")


def test_other_masks_and_biases_hold_beside_a_grammar(guided_engine: Callable[..., Engine]) -> None:
    (yes,), (no,) = (TOKENIZER.tokenize_str(word)[:1] for word in ("yes", "no"))
    choice = 'start: "yes" | "no"'
    asked = {
        "bias": guided("bias", grammar=choice, logit_bias=((yes, -100.0),)),
        "bad": guided("bad", grammar=choice, bad_words=((no,), *((token,) for token in TOKENIZER.tokenize_str("n")))),
        "wins": guided("wins", grammar=choice, allowed_token_ids=(no + 1,)),
        "penalty": guided("penalty", repetition_penalty=1.3, frequency_penalty=1.0, logprobs=1),
    }
    answers = run(guided_engine(), *asked.values())
    texts = {key: TOKENIZER.decode_str(answers.tokens(key)[:-1]) for key in asked}
    assert texts["bias"].startswith("n")
    assert texts["bad"].startswith("y")
    assert texts["wins"] in ("yes", "no")
    check(answers.tokens("penalty"))
    assert all(output.logprob is not None for output in answers.outputs["penalty", 0])


def test_preemption_changes_no_answer(guided_engine: Callable[..., Engine]) -> None:
    asked = [guided(f"{length}", length, seed=length) for length in (33, 47, 64, 50)]
    calm = run(guided_engine(), *asked)
    pressed = run(guided_engine(num_blocks=18), *asked)
    assert pressed.preempted
    for one in asked:
        check(pressed.tokens(one.key))
        assert pressed.tokens(one.key) == calm.tokens(one.key)


@pytest.mark.parametrize("cut", [1, 2, 7, 15])
def test_a_replay_goes_on_as_if_nothing_had_happened(cut: int, guided_engine: Callable[..., Engine]) -> None:
    whole = run(guided_engine(), guided("a")).tokens("a")
    known = ChoiceState(choice=ChoiceIndex(0), tokens=tuple(whole[:cut]))
    engine = guided_engine()
    again = EngineRequest(
        key="a", prompt=prompt_of(33), sampling=guided("a").sampling, hash_root=guided("a").hash_root, forced=(known,)
    )
    assert whole[:cut] + run(engine, again).tokens("a") == whole


def test_a_hand_over_goes_on_in_the_grammar(guided_engine: Callable[..., Engine]) -> None:
    whole = run(guided_engine(), guided("a")).tokens("a")
    sender, receiver = guided_engine(num_blocks=200), guided_engine(num_blocks=60)
    first = run(sender, guided("a", kind=RequestKind.PREFILL_ONLY)).tokens("a")
    holder, source = Holder(HoldKind.RESERVED, "a/1"), sender.block_table("a", GroupId(0))
    target: list[BlockId] | None = receiver.ledgers[0].allocate(holder, len(source))
    assert target is not None
    pools = [engine._runner.pools.tensors[0] for engine in (sender, receiver)]  # type: ignore[attr-defined]
    pools[1][target] = pools[0][source]
    sender.cancel("a")
    choice = ChoiceState(choice=ChoiceIndex(0), tokens=tuple(first))
    receiver.add_prefilled(guided("a"), holder, (target,), (choice,))
    assert first + run(receiver).tokens("a") == whole


def test_a_prompt_is_computed_while_its_grammar_is_compiled(
    guided_engine: Callable[..., Engine], grammars: OutputGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: Future[CompiledGrammar] = Future()
    monkeypatch.setattr(grammars, "compile", lambda grammar: pending)
    engine = guided_engine()
    engine.add(guided("a", 100))
    result = engine.step()
    assert result.prefill_tokens == 96, "all blocks but the one with the token that is sampled from"
    assert not result.outputs
    assert not engine.step().prefill_tokens
    engine.add(request("free", prompt_of(20)))
    assert [output.key for output in engine.step().outputs] == ["free"], "others do not wait"
    engine.cancel("free")
    monkeypatch.undo()
    pending.set_result(grammars.compile(GRAMMAR).result(10))
    check(run(engine).tokens("a"))


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(guided_engine: Callable[..., Engine]) -> None:
    engine = guided_engine()
    engine.add(guided("bad", grammar="start: missing"))
    engine.add(guided("good"))
    failed: dict[str, Exception] = {}
    good: list[int] = []
    while engine.has_work:
        result = engine.step()
        failed |= result.failed
        engine.scheduler.check_integrity()
        good += [output.token for output in result.outputs if output.key == "good"]
    assert list(failed) == ["bad"]
    assert isinstance(failed["bad"], InvalidGrammarError)
    check(good)


def test_outputs_that_break_their_grammar_fail_their_request_alone(guided_engine: Callable[..., Engine]) -> None:
    engine = guided_engine()
    wrong = ChoiceState(choice=ChoiceIndex(0), tokens=tuple(TOKENIZER.tokenize_str("no")))
    engine.add(
        EngineRequest(
            key="bad", prompt=prompt_of(33), sampling=guided("a").sampling, hash_root=guided("a").hash_root,
            forced=(wrong,),
        )
    )  # fmt: skip
    engine.add(guided("good"))
    failed: dict[str, Exception] = {}
    while engine.has_work:
        failed |= engine.step().failed
    assert list(failed) == ["bad"]


def test_a_matcher_that_fails_in_a_step_fails_its_request_alone(guided_engine: Callable[..., Engine]) -> None:
    engine = guided_engine()
    for key in ("bad", "good"):
        engine.add(guided(key))
    engine.step()
    state = engine.scheduler.get("bad")
    assert state is not None
    matcher = state.live[0].sampling.matcher
    assert matcher is not None
    matcher._matcher.consume_token(TOKENIZER.tokenize_str("}")[0])  # what the grammar does not allow here
    failed: dict[str, Exception] = {}
    tokens = []
    while engine.has_work:
        result = engine.step()
        failed |= result.failed
        tokens += [output.token for output in result.outputs if output.key == "good"]
    assert list(failed) == ["bad"]
    assert tokens[-1] == 1


def test_an_engine_without_a_tokenizer_refuses_grammars(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    with pytest.raises(InvalidGrammarError, match=r"tokenizer\.json"):
        engine.prepare(guided("a").sampling)
    with pytest.raises(InvalidGrammarError, match=r"tokenizer\.json"):
        engine.add(guided("a"))
    assert not engine.has_work


class SlowOnce:
    """A matcher of llguidance with a next mask that comes once `opened` is set."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher, self.begun, self.opened = matcher, threading.Event(), threading.Event()

    def compute_bitmask(self) -> bytes:
        self.begun.set()
        assert self.opened.wait(20)
        return self._matcher.compute_bitmask()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.fixture
def hasty() -> Iterator[OutputGrammars]:
    """Grammars with masks that are waited for no longer than a step takes."""
    made = OutputGrammars(lambda: load_tokenizer(MODEL, 4096, (1,)))
    yield made
    made.close()


@pytest.mark.parametrize("choices", [1, 2])
def test_a_mask_that_takes_long_holds_back_no_other_request(
    choices: int, new_engine: Callable[..., Engine], grammars: OutputGrammars, hasty: OutputGrammars
) -> None:
    asked = guided("slow", n=choices, max_tokens=12)
    expected = run(new_engine(grammars=grammars), asked)
    engine = new_engine(grammars=hasty)
    engine.add(asked)
    found: dict[int, list[int]] = {choice: [] for choice in range(choices)}

    def step() -> list[str]:
        outputs = engine.step().outputs
        engine.scheduler.check_integrity()
        for output in outputs:
            if output.key == "slow":
                found[output.choice].append(output.token)
        return [output.key for output in outputs]

    while not all(found.values()):
        step()
    state = engine.scheduler.get("slow")
    assert state is not None
    matcher = state.live[0].sampling.matcher
    assert matcher is not None
    matcher.mask()  # the one on its way
    slow = SlowOnce(matcher._matcher)
    matcher._matcher = slow  # type: ignore[assignment]
    engine.add(request("free", prompt_of(20), max_tokens=30))
    free = 0
    while free < 30:
        free += step().count("free")
    assert slow.begun.is_set()
    assert len(found[0]) < 12, "it waits"
    slow.opened.set()
    while engine.has_work:
        step()
    assert [found[choice] for choice in found] == [expected.tokens("slow", choice) for choice in found]


SPACED = OutputGrammar(orjson.dumps({"grammars": [{"json_schema": {**SCHEMA, "x-guidance": SPACING}}]}).decode(), "")


@pytest.mark.parametrize("grammar", [GRAMMAR, SPACED.text], ids=["no spacing", "any spacing"])
def test_drafts_change_no_answer(grammar: str, guided_engine: Callable[..., Engine]) -> None:
    asked = [
        guided("greedy", 31, grammar=grammar, temperature=0.0, logprobs=3),
        *(guided(f"{seed}", 40 + seed, grammar=grammar, seed=seed) for seed in range(5)),
        guided("two", 47, grammar=grammar, n=2, logprobs=1),
        guided("biased", grammar=grammar, temperature=0.0, logit_bias=((300, 5.0), (5, -3.0))),
        guided("penalty", grammar=grammar, frequency_penalty=1.0),
        guided("short", grammar=grammar, max_tokens=7),
        request("free", prompt_of(47), logprobs=2, max_tokens=40),
    ]
    without = run(guided_engine(draft_rows=0), *asked)
    for limits in ({"draft_rows": 16}, {"draft_rows": 64}, {"draft_rows": 64, "num_blocks": 34}):
        answers = run(guided_engine(**limits), *asked)
        assert bool(answers.preempted) is ("num_blocks" in limits)
        for place, outputs in without.outputs.items():
            found = answers.outputs[place]
            assert [one.token for one in found] == [one.token for one in outputs], place
            assert [one.index for one in found] == list(range(len(outputs)))
            assert [one.finish for one in found] == [one.finish for one in outputs]
            for one, other in zip(found, outputs, strict=True):
                if other.logprob is not None:
                    assert one.logprob is not None
                    assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-3)


def drafts_of(engine: Engine) -> tuple[float, float]:
    """Drafts that its grammars counted, of all engines that share them: computed and accepted ones."""
    assert engine.grammars is not None
    counters = engine.grammars.counters()
    return counters[names.GRAMMAR_DRAFTS], counters[names.GRAMMAR_ACCEPTED_DRAFTS]


def test_drafts_that_hold_save_steps(guided_engine: Callable[..., Engine]) -> None:
    counts = {}
    for rows in (0, 16):
        engine = guided_engine(draft_rows=rows)
        before = drafts_of(engine)
        engine.add(guided("a", temperature=0.0))
        results = []
        while engine.has_work:
            results.append(engine.step())
        outputs = [output for result in results for output in result.outputs]
        counts[rows] = len(results)
        assert sum(result.decode_tokens for result in results) == len(outputs) - 1, "no draft was wrong"
        computed, accepted = (now - then for now, then in zip(drafts_of(engine), before, strict=True))
        assert computed == accepted == len(outputs) - len(results)
        check([output.token for output in outputs])
    assert counts[16] <= 0.7 * counts[0]


def test_drafts_that_do_not_hold_leave_the_blocks_as_they_were(guided_engine: Callable[..., Engine]) -> None:
    """Blanks are written at random, so that the usual spacing is often wrong; blocks stay findable and right."""
    asked = guided("a", 33, grammar=SPACED.text, seed=3, max_tokens=120)
    engine = guided_engine(draft_rows=64)
    before = drafts_of(engine)
    first = run(engine, asked).tokens("a")
    computed, accepted = (now - then for now, then in zip(drafts_of(engine), before, strict=True))
    assert 0 < accepted < computed
    again = request("b", (*prompt_of(33), *first[:-1]), max_tokens=20, logprobs=3)
    cached = run(engine, again)
    assert cached.cached >= 33 + len(first) - 1 - 2 * 16
    fresh = run(guided_engine(), again)
    assert cached.tokens("b") == fresh.tokens("b")


def test_no_draft_takes_the_block_of_another(guided_engine: Callable[..., Engine]) -> None:
    engine = guided_engine(num_blocks=18, draft_rows=64)
    answers = run(engine, *(guided(f"{seed}", 30, seed=seed, grammar=SPACED.text) for seed in range(6)))
    for seed in range(6):
        check(answers.tokens(f"{seed}"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_do_not_depend_on_drafts(dtype: str, grammars: OutputGrammars) -> None:
    runner = ModelRunner(model_dir=MODEL, dtype=dtype, num_blocks=100, max_model_len=512, is_deterministic=True)
    asked = [guided(f"{seed}", 40 + seed, grammar=SPACED.text, seed=seed, logprobs=2) for seed in range(3)]
    answers = []
    for rows in (0, 64):
        config = SchedulerConfig(max_step_s=1e9, draft_rows=rows)
        answers.append(run(Engine(runner, config=config, clock=MonotonicClock(), grammars=grammars), *asked))
    assert answers[0].scored() == answers[1].scored()
    assert answers[1].together > len(asked), "drafts were computed"
