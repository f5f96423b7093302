"""Test API keys, the cluster secret and proofs of calls."""

import stat
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.core.api_keys import KeyWish, Scope, draw, id_of
from tandem.core.call_proof import (
    ANSWER_KEY,
    CONTROL,
    MAX_REMEMBERED,
    PEER,
    PROOF_KEY,
    STREAM,
    WINDOW_S,
    CallProof,
    ProofChecker,
    Refused,
    stream_target,
    value_of,
)
from tandem.core.errors import ConfigError, InvalidRequestError
from tandem.core.secret import ANSWER_BYTES, ClusterSecret

WISH = KeyWish(tenant="acme", scopes=(Scope.INFER, Scope.METRICS), lifetime_s=60, slo="fast", priority=-3, name="Ann's")


def test_a_key_opens_and_is_not_kept() -> None:
    text, key = draw(WISH, 1000.4)
    assert key.is_opened_by(text)
    assert id_of(text) == key.id
    assert text.startswith(f"{key.shown}-")
    assert len(text) > 50
    assert text.partition(f"{key.shown}-")[2] not in repr(key)
    assert (key.tenant, key.scopes, key.slo, key.priority, key.name) == ("acme", WISH.scopes, "fast", -3, "Ann's")
    assert (key.created_s, key.expires_s) == (1000, 1060)


def test_no_two_keys_are_alike() -> None:
    drawn = [draw(WISH, 0) for _ in range(50)]
    assert len({text for text, _ in drawn}) == len({key.id for _, key in drawn}) == 50
    (text, _), (_, other) = drawn[:2]
    assert not other.is_opened_by(text)


@given(at=st.integers(0, 200), place=st.integers(0, 10**6), new=st.characters())
@example(at=0, place=0, new="\ud800")
def test_any_other_text_does_not_open(at: int, place: int, new: str) -> None:
    text, key = draw(WISH, at)
    place %= len(text)
    wrong = text[:place] + new + text[place + 1 :]
    assert key.is_opened_by(wrong) == (wrong == text)


def test_it_expires_at_its_second() -> None:
    _, key = draw(WISH, 1000)
    assert not key.is_expired(1059.9)
    assert key.is_expired(1060)
    _, forever = draw(replace(WISH, lifetime_s=0), 1000)
    assert not forever.is_expired(1e12)


@pytest.mark.parametrize("text", ["", "none", "sk-proj-abc", "tdk-0123", "tdk-0123456789ab-short", "tdk-" + "é" * 60])
def test_what_is_no_key_of_ours(text: str) -> None:
    assert id_of(text) is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": "x" * 65}, "tenant"),
        ({"tenant": "anonymous"}, "tenant"),
        ({"scopes": ()}, "scopes"),
        ({"scopes": (Scope.INFER, Scope.INFER)}, "scopes"),
        ({"lifetime_s": -1}, "lifetime_s"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"name": "x" * 201}, "name"),
        ({"name": "a\nb"}, "name"),
    ],
)
def test_wrong_wishes_name_the_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        draw(replace(WISH, **change), 0)
    assert caught.value.param == param


FIXED = ClusterSecret(b"0123456789abcdef")


def test_saved_and_loaded_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = ClusterSecret.generate()
    secret.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterSecret.load(path).derive(b"a") == secret.derive(b"a")
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


def test_missing_or_short_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ClusterSecret.load(tmp_path / "none")
    short = tmp_path / "short"
    short.write_bytes(b"  0123456789\n")
    with pytest.raises(ConfigError, match="too short"):
        ClusterSecret.load(short)


def test_it_is_never_printed() -> None:
    assert "0123" not in f"{SECRET} {SECRET!r}"


def test_answers_are_checked() -> None:
    other = ClusterSecret(b"fedcba9876543210")
    nonce = b"n" * 32
    answer = FIXED.answer(nonce, b"kv")
    assert len(answer) == ANSWER_BYTES
    assert FIXED.is_answer(nonce, b"kv", answer)
    assert not FIXED.is_answer(nonce, b"control", answer)
    assert not FIXED.is_answer(b"m" * 32, b"kv", answer)
    assert not other.is_answer(nonce, b"kv", answer)
    assert not FIXED.is_answer(nonce, b"kv", b"")


def test_generated_secrets_and_derived_keys_differ() -> None:
    assert ClusterSecret.generate().derive(b"a") != ClusterSecret.generate().derive(b"a")
    assert FIXED.derive(b"a") != FIXED.derive(b"b")
    assert len(FIXED.derive(b"a")) == 32
    assert FIXED.mac(b"a", b"m") not in (FIXED.mac(b"b", b"m"), FIXED.mac(b"a", b"n"), FIXED.derive(b"a").hex())


SECRET, OTHER = ClusterSecret(b"0123456789abcdef"), ClusterSecret(b"fedcba9876543210")
D0 = stream_target("d0", 77)


@dataclass
class Clock:
    """A wall clock that is moved by hand, from now on."""

    now_s: float = field(default_factory=time.time)

    def __call__(self) -> float:
        return self.now_s


def kind_of(checker: ProofChecker, line: str, method: str = STREAM, target: str | None = D0) -> Refused | None:
    refusal = checker.refusal(line, method, target)
    return refusal.kind if refusal else None


def test_it_is_good_once() -> None:
    checker, line = ProofChecker(SECRET), CallProof.of(SECRET, STREAM, D0).line
    assert kind_of(checker, line) is None
    assert kind_of(checker, line) is Refused.STALE
    assert kind_of(checker, CallProof.of(SECRET, STREAM, D0).line) is None


def test_what_is_meant_for_another_worker_incarnation_method_or_cluster_is_refused() -> None:
    checker = ProofChecker(SECRET)
    for target in ("d1/77", "d0/78", "d0"):
        assert kind_of(checker, CallProof.of(SECRET, STREAM, target).line) is Refused.ELSEWHERE
    for method in (PEER, CONTROL):
        assert kind_of(checker, CallProof.of(SECRET, method, D0).line) is Refused.STRANGER
    assert kind_of(checker, CallProof.of(OTHER, STREAM, D0).line) is Refused.STRANGER


@pytest.mark.parametrize("passes", ["record", "delay"])
def test_a_call_is_of_no_use_after_some_seconds(passes: str) -> None:
    clock = Clock()
    checker, line = ProofChecker(SECRET, clock), CallProof.of(SECRET, STREAM, D0).line
    if passes == "record":
        assert kind_of(checker, line) is None
    clock.now_s += WINDOW_S + 0.01
    assert kind_of(checker, line) is Refused.STALE
    clock.now_s += 10 * WINDOW_S
    assert kind_of(checker, line) is Refused.STALE


def test_clocks_may_differ_a_little() -> None:
    line, clock = CallProof.of(SECRET, STREAM, D0).line, Clock(time.time() - WINDOW_S + 1)
    assert kind_of(ProofChecker(SECRET, clock), line) is None
    clock.now_s -= 2
    refusal = ProofChecker(SECRET, clock).refusal(line, STREAM, D0)
    assert refusal is not None
    assert "ahead" in refusal.why
    assert "clocks" in refusal.why


def test_a_call_of_a_clock_that_is_ahead_is_not_good_later() -> None:
    line, clock = CallProof.of(SECRET, STREAM, D0).line, Clock(time.time() - 1.5 * WINDOW_S)
    checker = ProofChecker(SECRET, clock)
    assert kind_of(checker, line) is Refused.STALE
    clock.now_s += WINDOW_S
    refusal = checker.refusal(line, STREAM, D0)
    assert refusal is not None
    assert "used before" in refusal.why


def test_a_clock_that_is_far_ahead_keeps_nothing_of_others_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    checker = ProofChecker(SECRET, clock)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (clock.now_s + 3600)))
    assert kind_of(checker, CallProof.of(SECRET, STREAM, D0).line) is Refused.STALE
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * clock.now_s))
    for _ in range(3):
        for _ in range(MAX_REMEMBERED // 2):
            assert kind_of(checker, CallProof.of(SECRET, STREAM, D0).line) is None
        clock.now_s += WINDOW_S


def test_a_process_takes_no_call_that_was_made_for_the_one_before_it() -> None:
    line = CallProof.of(SECRET, CONTROL, "d0").line
    assert kind_of(ProofChecker(SECRET, Clock(time.time() + 1)), line, CONTROL, "d0") is Refused.STALE


@pytest.mark.parametrize(
    "line",
    [
        "", " ", "a", "a b c", "a b c d", "a b c d e", f"{D0} 1 2 ", "é 1 2 3", "\0" * 5000, "a " * 5000,
        CallProof.of(SECRET, STREAM, D0).line[:-1], CallProof.of(SECRET, STREAM, D0).line + "0",
        CallProof.of(SECRET, STREAM, D0).line.upper(),
    ],
)  # fmt: skip
def test_what_is_no_proof_is_a_stranger(line: str) -> None:
    assert kind_of(ProofChecker(SECRET), value_of(((PROOF_KEY, line.encode()),), PROOF_KEY)) is Refused.STRANGER


def test_what_is_remembered_is_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * clock.now_s))
    checker = ProofChecker(SECRET, clock)
    lines = (CallProof.of(SECRET, STREAM, D0).line for _ in range(MAX_REMEMBERED + 1))
    assert [kind_of(checker, line) for line in lines][-2:] == [None, Refused.STALE]
    clock.now_s += WINDOW_S
    assert kind_of(checker, CallProof.of(SECRET, STREAM, D0).line) is None


def test_the_answer_is_of_who_knows_the_secret_and_of_this_call() -> None:
    proof, other = CallProof.of(SECRET, STREAM, D0), CallProof.of(SECRET, STREAM, D0)
    answer = ProofChecker(SECRET).answer(proof.line)
    assert proof.is_answered(answer)
    assert not other.is_answered(answer)
    assert not proof.is_answered(ProofChecker(OTHER).answer(proof.line))
    assert not proof.is_answered(())
    assert not proof.is_answered(((ANSWER_KEY, "é"),))
    assert not proof.is_answered(((ANSWER_KEY, proof.line.rpartition(" ")[2]),))
