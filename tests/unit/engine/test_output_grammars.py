"""Grammars in a worker: compiled once, followed token by token, and rebuilt by replay at every place of an answer."""

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.core.errors import InvalidGrammarError
from tandem.core.output_grammar import SPACING
from tandem.core.thread_priority import NICENESS
from tandem.engine import output_grammars
from tandem.engine.output_grammars import OutputGrammars, load_tokenizer
from tandem.engine.output_matcher import QUICK_S, OutputMatcher, timely_masks
from tests.unit.engine.bundled import MODEL
from tools import waiting

EOS = 1
SPECIAL = 2
VOCAB = 4096
TOKENIZER = LLTokenizer(str(MODEL / "tokenizer.json"), VOCAB, [EOS])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "number"}}},
    "required": ["name", "sizes"],
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA)
PATIENCE_S = 10.0
"""Tests run beside others: no mask is late, unless one is to be."""
ANSWER = '{"name": "Zoë \\"the cat\\"", "sizes": [1, -2.5e3]}'


@pytest.fixture
def grammars() -> Iterator[OutputGrammars]:
    made = OutputGrammars(lambda: load_tokenizer(MODEL, VOCAB, (EOS,)), PATIENCE_S)
    yield made
    made.close()


def test_a_tokenizer_is_loaded_before_cores_are_yielded() -> None:
    """It holds the interpreter's lock: without a core it would hold back the whole process."""

    def load() -> LLTokenizer:
        found.append(niceness())
        return TOKENIZER

    found: list[int] = []
    made = OutputGrammars(load, PATIENCE_S)
    matcher_of(made)
    found.append(made._compiling.submit(niceness).result())
    made.close()
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == [usual, max(usual, NICENESS)]


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_wait_for_a_core_makes_no_matcher_slow(grammars: OutputGrammars) -> None:
    matcher = matcher_of(grammars)
    given = matcher._matcher

    class Waiting:
        def compute_bitmask(self) -> bytes:
            begun_s = time.monotonic()
            waited.wait(5 * QUICK_S)
            took_s.append(time.monotonic() - begun_s)
            return given.compute_bitmask()

        def __getattr__(self, name: str) -> Any:
            return getattr(given, name)

    waited, took_s = threading.Event(), list[float]()
    matcher._matcher = Waiting()  # type: ignore[assignment]
    matcher._patience_s = 0.0
    matcher.begin()
    matcher.mask()
    assert took_s[-1] > QUICK_S
    matcher.advance(TOKENIZER.tokenize_str(ANSWER)[0])
    assert not matcher.is_held


def matcher_of(grammars: OutputGrammars, grammar: str = GRAMMAR, stops: tuple[int, ...] = ()) -> OutputMatcher:
    return grammars.matcher(grammars.compile(grammar).result(waiting.PATIENCE_S), stops)


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1}


def test_an_answer_is_followed_to_its_end(grammars: OutputGrammars) -> None:
    matcher = matcher_of(grammars)
    for token in TOKENIZER.tokenize_str(ANSWER):
        assert EOS not in allowed(matcher.mask())
        assert token in allowed(matcher.mask())
        matcher.advance(token)
        assert not matcher.is_complete
    assert allowed(matcher.mask()) == {EOS}
    matcher.advance(EOS)
    assert matcher.is_complete
    assert not matcher.error


def test_replay_gives_equal_masks_at_every_cut(grammars: OutputGrammars) -> None:
    tokens = TOKENIZER.tokenize_str(ANSWER)
    undisturbed = matcher_of(grammars)
    for cut, token in enumerate(tokens):
        other = matcher_of(grammars)
        other.replay(tokens[:cut])
        assert other.mask() == undisturbed.mask(), cut
        undisturbed.advance(token)


def test_choices_of_one_grammar_do_not_share_their_place(grammars: OutputGrammars) -> None:
    first, second = matcher_of(grammars), matcher_of(grammars)
    before = second.mask()
    first.replay(TOKENIZER.tokenize_str(ANSWER))
    assert second.mask() == before
    assert grammars.compiled == 1
    assert grammars.reused == 1


def test_a_token_outside_the_grammar_is_an_error_of_its_choice_alone(grammars: OutputGrammars) -> None:
    wrong, right = matcher_of(grammars), matcher_of(grammars)
    wrong.advance(TOKENIZER.tokenize_str("no")[0])
    assert wrong.error
    assert not wrong.is_complete
    right.advance(TOKENIZER.tokenize_str("{")[0])
    assert not right.error


def test_stop_tokens_wait_for_a_complete_answer(grammars: OutputGrammars) -> None:
    brace = TOKENIZER.tokenize_str("}")[0]
    nested = json.dumps({"a": {"b": 1}})
    matcher = matcher_of(grammars, LLMatcher.grammar_from_json_schema({"type": "object"}), (SPECIAL, brace))
    tokens = TOKENIZER.tokenize_str(nested)
    assert tokens[-2:] == [brace, brace], "the inner object ends with a token of its own"
    for token in tokens[:-2]:
        assert SPECIAL not in allowed(matcher.mask())
        matcher.advance(token)
    assert brace not in allowed(matcher.mask()), "the outer object would be open"
    matcher.advance(brace)
    assert brace in allowed(matcher.mask())
    matcher.advance(brace)
    assert allowed(matcher.mask()) == {EOS, SPECIAL}
    matcher.advance(SPECIAL)
    assert matcher.is_complete
    assert not matcher.error


def test_masks_come_from_another_thread(grammars: OutputGrammars) -> None:
    first, second = matcher_of(grammars), matcher_of(grammars)
    (wanted,) = first.compute()
    grammars.begin_masks({first: (), second: ()})
    assert first.mask() == second.mask() == wanted
    assert grammars.masks == 2
    grammars.begin_masks({first: (), second: ()})
    assert first.mask() == wanted
    assert grammars.masks == 2, "nothing is computed again before a token came"
    first.advance(TOKENIZER.tokenize_str("{")[0])
    grammars.begin_masks({first: ()})
    assert first.mask() != wanted


def test_masks_behind_drafts_are_those_behind_the_same_tokens(grammars: OutputGrammars) -> None:
    text = '{"name": "Zo", "sizes": [1, 2]}'
    tokens, ahead, behind = TOKENIZER.tokenize_str(text), matcher_of(grammars), matcher_of(grammars)
    grammars.begin_masks({ahead: tokens})
    for count, token in enumerate(tokens):
        assert ahead.mask(tokens[:count]) == behind.mask(), count
        behind.advance(token)
    assert ahead.mask(tokens) == behind.mask()
    ahead.replay(tokens)
    assert ahead.mask() == behind.mask(), "drafts are taken back"


def test_drafts_are_what_must_follow(grammars: OutputGrammars) -> None:
    spaced = json.dumps({"grammars": [{"json_schema": {**SCHEMA, "x-guidance": SPACING}}]}, separators=(",", ":"))
    matcher = matcher_of(grammars, spaced)
    matcher.replay(TOKENIZER.tokenize_str("{"))
    assert TOKENIZER.decode_str(list(matcher.drafts(8))) == '"name":'
    assert len(matcher.drafts(1)) == 1
    matcher.replay(TOKENIZER.tokenize_str('"name":"a"'))
    assert matcher.drafts(8) == (), "the usual spacing is not this answer's"
    complete = matcher_of(grammars, 'start: "yes"')
    complete.replay(complete.drafts(8))
    assert allowed(complete.mask()) == {EOS}
    assert complete.drafts(8) == (), "the end is chosen"


def test_no_draft_is_a_stop_token(grammars: OutputGrammars) -> None:
    tokens = TOKENIZER.tokenize_str("the whole sentence")
    stop = tokens[-1]
    assert matcher_of(grammars, 'start: "the whole sentence"').drafts(8)[: len(tokens)] == tuple(tokens)
    assert stop not in matcher_of(grammars, 'start: "the whole sentence"', (stop,)).drafts(8)


class Untokenized:
    """A matcher of llguidance that forbids to tokenize all of what it forces."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def compute_ff_tokens(self) -> list[int]:
        raise AssertionError("all of it is tokenized")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_drafts_of_a_long_text_take_its_beginning_alone(grammars: OutputGrammars) -> None:
    text = "the whole sentence " * 5000
    matcher = matcher_of(grammars, f'start: "{text}"')
    matcher._matcher = Untokenized(matcher._matcher)  # type: ignore[assignment]
    drafts = matcher.drafts(8)
    assert len(drafts) == 8
    assert text.startswith(TOKENIZER.decode_str(list(drafts)))


def test_a_mask_that_is_late_is_given_up_and_comes_later(grammars: OutputGrammars) -> None:
    late, quick = matcher_of(grammars), matcher_of(grammars)
    (wanted,) = quick.compute()
    begun, opened = threading.Event(), threading.Event()
    compute = late._matcher.compute_bitmask

    class Blocked(Untokenized):
        def compute_bitmask(self) -> bytes:
            begun.set()
            assert opened.wait(20)
            return compute()

    late._matcher = Blocked(late._matcher)  # type: ignore[assignment]
    late._patience_s, quick._patience_s = 0.0, 3.0
    late.begin()
    assert begun.wait(20)
    masks = timely_masks([(quick, ()), (late, ())])
    assert masks[0] == wanted, "it is not behind the late one"
    assert allowed(masks[1]) == set(range(VOCAB))
    assert [one.take_late() for one in (late, quick)] == [True, False]
    assert not late.take_late()
    assert late.is_held
    opened.set()
    assert late.mask() == wanted
    assert not late.is_held
    assert timely_masks([(late, ())]) == [wanted]


def test_a_grammar_that_cannot_be_used_is_an_error_of_the_client(grammars: OutputGrammars) -> None:
    with pytest.raises(InvalidGrammarError, match="missing"):
        grammars.compile("start: missing").result(waiting.PATIENCE_S)


def test_the_oldest_grammars_are_forgotten(grammars: OutputGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 20
    monkeypatch.setattr(output_grammars, "MAX_COMPILED", kept)
    for number in range(kept + 5):
        grammars.compile(f'start: "{number}"')
    assert len(grammars) == kept
    grammars.compile('start: "5"').result(waiting.PATIENCE_S)
    assert grammars.reused == 1
    grammars.compile('start: "0"').result(waiting.PATIENCE_S)
    assert grammars.reused == 1, "it was forgotten"
    monkeypatch.setattr(output_grammars, "MAX_CHARS", 100)
    grammars.compile(f'start: "{"x" * 200}"')
    assert len(grammars) == 1
    grammars.compile('start: "1"')
    assert len(grammars) == 1


def test_grammars_that_take_much_memory_are_forgotten_before_others(
    grammars: OutputGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [f'start: "{letter * 50_000}"' for letter in "abcd"]
    sizes = [grammars.compile(grammar).result(waiting.PATIENCE_S).size_bytes for grammar in large[:3]]
    assert min(sizes) > 1 << 20
    monkeypatch.setattr(output_grammars, "MAX_BYTES", sum(sizes) - sizes[0] // 2)
    grammars.compile(large[3]).result(waiting.PATIENCE_S)
    assert len(grammars) == 3
    grammars.compile(large[1]).result(waiting.PATIENCE_S)
    assert grammars.reused == 1
    grammars.compile('start: "small"')
    assert len(grammars) < 4, "the sum of the sizes is still too large"


def test_threads_end() -> None:
    before = set(threading.enumerate())  # engines of other tests in this process may hold threads of these names
    grammars = OutputGrammars(lambda: load_tokenizer(MODEL, VOCAB, (EOS,)), PATIENCE_S)
    matcher_of(grammars)
    assert "grammars_0" in {thread.name for thread in set(threading.enumerate()) - before}
    grammars.close()
    left = set(threading.enumerate()) - before
    assert not {"grammars_0", "masks", "masks slow"} & {thread.name for thread in left}
