"""A proof of a call is good for one method, one target, a few seconds and one use."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

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
from tandem.core.secret import ClusterSecret

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
