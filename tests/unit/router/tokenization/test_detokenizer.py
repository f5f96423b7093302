"""Text as it grows: whole characters only, the same in the end, and cut at stop strings wherever chunks fall."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.tokenization.detokenizer import ByteDetokenizer, IncrementalDetokenizer, StopMatcher
from tandem.router.tokenization.tokenizer import Tokenizer

MODEL = Path(__file__).parents[4] / "models" / "tandem-tiny"


def as_bytes(tokens: Sequence[int]) -> str:
    """Decode tokens that are bytes: every character of more than one byte is split."""
    return bytes(tokens).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


def in_parts(tokens: Sequence[int], rng: random.Random) -> list[Sequence[int]]:
    parts, at = [], 0
    while at < len(tokens):
        size = rng.choice([1, 1, 1, 2, 5])
        parts.append(tokens[at : at + size])
        at += size
    return parts


@settings(deadline=None)
@given(st.text(), st.randoms(use_true_random=False))
def test_characters_are_never_broken(text: str, rng: random.Random) -> None:
    detokenizer = IncrementalDetokenizer(as_bytes)
    shown = ""
    for part in in_parts(text.encode("utf-8", "ignore"), rng):
        shown += detokenizer.add(list(part))
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


@settings(deadline=None)
@given(st.binary(max_size=200), st.randoms(use_true_random=False))
def test_broken_bytes_end_up_like_decoding_at_once(data: bytes, rng: random.Random) -> None:
    detokenizer = IncrementalDetokenizer(as_bytes)
    shown = "".join(detokenizer.add(list(part)) for part in in_parts(data, rng)) + detokenizer.finish()
    assert shown == as_bytes(data)


def as_fallback_bytes(tokens: Sequence[int]) -> str:
    """Decode as sentencepiece models do: a run of bytes that is not text as a whole is one replacement a byte."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(tokens)


def test_a_character_is_whole_where_each_of_its_bytes_is_a_replacement_until_then() -> None:
    detokenizer = IncrementalDetokenizer(as_fallback_bytes)
    assert "".join(detokenizer.add([byte]) for byte in "🎉".encode()) == "🎉"


class Counted:
    """A decoder, and the most tokens that it was given at once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.most, self._decode = 0, decode

    def __call__(self, tokens: Sequence[int]) -> str:
        self.most = max(self.most, len(tokens))
        return self._decode(tokens)


@pytest.mark.parametrize("decode", [as_bytes, as_fallback_bytes])
@pytest.mark.parametrize("data", [b"\x80", b"\xf0\x9f\x8e", b"\xe2\x82", b"\xc3\xf0\x9f"], ids=bytes.hex)
def test_bytes_that_are_no_text_do_not_pile_up(decode: Callable[[Sequence[int]], str], data: bytes) -> None:
    counted = Counted(decode)
    detokenizer = IncrementalDetokenizer(counted)
    tokens = list(data * 300)
    shown = "".join(detokenizer.add([token]) for token in tokens)
    assert counted.most < 50
    assert len(decode(tokens)) - 3 <= len(shown) <= len(decode(tokens))
    assert shown + detokenizer.finish() == decode(tokens)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0x80, 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0x8E, 0x41]), min_size=60, max_size=400))
def test_long_broken_texts_end_up_like_decoding_at_once(tokens: list[int]) -> None:
    counted = Counted(as_bytes)
    detokenizer = IncrementalDetokenizer(counted)
    shown = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.finish()
    assert shown == as_bytes(tokens)
    assert counted.most < 50


def test_real_tokens(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(200):
        tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(80))]
        for detokenizer in (tokenizer.detokenizer(), IncrementalDetokenizer(tokenizer.decode)):
            shown = "".join(detokenizer.add(part) for part in in_parts(tokens, rng)) + detokenizer.finish()
            assert shown == tokenizer.decode(tokens)


def test_tokens_that_are_bytes_are_not_decoded_again(tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)


@settings(deadline=None)
@given(st.binary(max_size=200), st.randoms(use_true_random=False))
def test_bytes_of_tokens_become_the_text_of_all_together(data: bytes, rng: random.Random) -> None:
    detokenizer, shown = ByteDetokenizer(lambda token: bytes([token])), ""
    for part in in_parts(data, rng):
        shown += detokenizer.add(list(part))
        assert as_bytes(data).startswith(shown)
    assert shown + detokenizer.finish() == as_bytes(data)


def test_held_back_until_complete() -> None:
    detokenizer = IncrementalDetokenizer(as_bytes)
    first, second, third, fourth = "🎉".encode()
    assert [detokenizer.add([byte]) for byte in (65, first, second, third)] == ["A", "", "", ""]
    assert detokenizer.add([fourth]) == "🎉"


@settings(deadline=None)
@given(
    st.text(alphabet="abc", max_size=60),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    st.randoms(use_true_random=False),
)
def test_stop_strings(text: str, stops: list[str], rng: random.Random) -> None:
    matcher = StopMatcher(stops)
    shown, end = "", len(text)
    for stop in stops:
        found = text.find(stop)
        end = min(end, found) if found >= 0 else end
    for part in in_parts(text, rng):  # type: ignore[arg-type]
        shown += matcher.add("".join(part))  # type: ignore[arg-type]
        # Whichever stop completes first cuts; nothing that belongs to one is ever shown.
        assert text.startswith(shown)
        if matcher.is_stopped:
            break
    shown += matcher.finish()
    assert matcher.is_stopped == any(stop in text for stop in stops)
    if matcher.is_stopped:
        assert not any(stop in shown for stop in stops)
        assert end <= len(shown) <= max(text.find(stop) for stop in stops if stop in text)
    else:
        assert shown == text


def test_partial_match_is_held_then_released() -> None:
    matcher = StopMatcher(["###", "END"])
    assert matcher.add("one ##") == "one "
    assert matcher.add("!") == "##!"
    assert matcher.add(" E") == " "
    assert matcher.add("N") == ""
    assert matcher.finish() == "EN"


@settings(deadline=None)
@given(
    st.text(alphabet="abc", max_size=40),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 40),
    st.booleans(),
)
def test_stop_strings_count_only_beyond_the_first_characters(
    text: str, stops: list[str], free: int, is_included: bool
) -> None:
    matcher = StopMatcher(stops, is_included=is_included)
    shown = ""
    for place, character in enumerate(text):
        shown += matcher.add(character, may_stop=place >= free)
    shown += matcher.finish()
    places = range(len(text))
    ends = [(at + len(stop), at) for stop in stops for at in places if text.startswith(stop, at)]
    ends = [(end, start) for end, start in ends if end > free]
    assert matcher.is_stopped == bool(ends)
    if not ends:
        assert shown == text
        return
    first = min(end for end, _ in ends)
    if is_included:
        assert shown == text[:first]
    else:
        assert shown == text[: min(start for end, start in ends if end == first)]


class CountedText(str):
    """A stop string that counts how often a character of it is looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> str:
        CountedText.looks += 1
        return super().__getitem__(at)


def test_what_is_held_back_is_not_compared_again() -> None:
    CountedText.looks = 0
    matcher = StopMatcher([CountedText("a" * 1000 + "b")])
    shown = "".join(matcher.add("a") for _ in range(5000))
    assert shown == "a" * 4000
    assert CountedText.looks < 10 * 5000
    assert matcher.add("b") == ""
    assert matcher.is_stopped


def test_a_stop_string_is_a_part_of_the_text_if_it_is_asked_for() -> None:
    matcher = StopMatcher(["END", "ENDE"], is_included=True)
    assert matcher.add("one EN") == "one "
    assert matcher.add("DE two") == "END"
    assert matcher.is_stopped
    assert matcher.finish() == ""
