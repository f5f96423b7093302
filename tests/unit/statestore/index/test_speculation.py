"""Expected blocks of workers, against a model that keeps every prompt and looks at all of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.core.block_hash import BlockHash, next_hash
from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.index.speculation import Speculation

ROOT = BlockHash(bytes(16))
ONE = Incarnation(1)
MAX_BLOCKS, PENDING_S, SETTLED_S = 24, 10.0, 2.0

tokens = st.lists(st.integers(0, 1), max_size=6)
names = st.sampled_from([WorkerId("w1"), WorkerId("w2")])
requests = st.sampled_from(["a", "b", "c", "d", "e"])


def hashes(branches: list[int]) -> list[BlockHash]:
    """A chain of blocks; equal leading numbers are a common prefix."""
    chain = [ROOT]
    for branch in branches:
        chain.append(next_hash(chain[-1], [branch]))
    return chain[1:]


def speculation(clock: ManualClock, max_blocks: int = MAX_BLOCKS) -> Speculation:
    return Speculation(clock, max_blocks=max_blocks, pending_s=PENDING_S, settled_s=SETTLED_S)


@dataclass
class Sent:
    holder: tuple[WorkerId, Incarnation]
    prompt: list[BlockHash]
    ends_s: float
    order: int
    is_settled: bool = False


class SpeculationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.real = speculation(self.clock)
        self.sent: dict[tuple[str, WorkerId], Sent] = {}
        self.orders = 0

    def order(self) -> int:
        self.orders += 1
        return self.orders

    def expire(self) -> None:
        self.sent = {key: one for key, one in self.sent.items() if one.ends_s > self.clock.now_s()}

    @rule(request=requests, worker=names, incarnation=st.integers(1, 2), branches=tokens)
    def expect(self, request: str, worker: WorkerId, incarnation: int, branches: list[int]) -> None:
        prompt = hashes(branches)
        self.real.expect(request, worker, Incarnation(incarnation), prompt)
        self.expire()
        self.sent.pop((request, worker), None)
        if not prompt:
            return
        while sum(len(one.prompt) for one in self.sent.values()) + len(prompt) > MAX_BLOCKS:
            del self.sent[min(self.sent, key=lambda key: (not self.sent[key].is_settled, self.sent[key].order))]
        ends_s = self.clock.now_s() + PENDING_S
        self.sent[request, worker] = Sent((worker, Incarnation(incarnation)), prompt, ends_s, self.order())

    @rule(request=requests, worker=names)
    def settle(self, request: str, worker: WorkerId) -> None:
        self.real.settle(request, worker)
        one = self.sent.get((request, worker))
        if one is not None and not one.is_settled:
            one.is_settled, one.ends_s, one.order = True, self.clock.now_s() + SETTLED_S, self.order()

    @rule(request=requests, worker=names)
    def withdraw(self, request: str, worker: WorkerId) -> None:
        self.real.withdraw(request, worker)
        if (request, worker) in self.sent and not self.sent[request, worker].is_settled:
            del self.sent[request, worker]

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(branches=tokens)
    def lookup(self, branches: list[int]) -> None:
        prompt = hashes(branches)
        self.expire()
        expected: dict[tuple[WorkerId, Incarnation], int] = {}
        for one in self.sent.values():
            depth = 0
            while depth < min(len(prompt), len(one.prompt)) and prompt[depth] == one.prompt[depth]:
                depth += 1
            if depth:
                expected[one.holder] = max(depth, expected.get(one.holder, 0))
        assert self.real.lookup(prompt) == expected

    @invariant()
    def is_sound(self) -> None:
        self.real.check_integrity()


SpeculationMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSpeculation = SpeculationMachine.TestCase


def test_a_prompt_that_was_computed_outlives_its_request_by_a_short_time() -> None:
    clock = ManualClock()
    real, prompt = speculation(clock), hashes([0, 1, 0])
    real.expect("a", WorkerId("w1"), ONE, prompt)
    clock.advance(PENDING_S - 1)
    real.settle("a", WorkerId("w1"))
    real.withdraw("a", WorkerId("w1"))
    clock.advance(SETTLED_S - 0.1)
    assert real.lookup(prompt) == {("w1", ONE): 3}
    clock.advance(0.1)
    assert real.lookup(prompt) == {}
    assert real.blocks == 0


def test_withdrawing_one_request_leaves_what_another_expects() -> None:
    real = speculation(ManualClock())
    real.expect("a", WorkerId("w1"), ONE, hashes([0, 0, 0, 0]))
    real.expect("b", WorkerId("w1"), ONE, hashes([0, 0, 1]))
    real.withdraw("a", WorkerId("w1"))
    assert real.lookup(hashes([0, 0, 0, 0])) == {("w1", ONE): 2}


def test_a_prompt_longer_than_the_bound_is_expected_as_far_as_it_fits() -> None:
    real, prompt = speculation(ManualClock(), max_blocks=3), hashes([1, 0, 1, 0, 1])
    real.expect("a", WorkerId("w1"), ONE, hashes([0]))
    real.expect("b", WorkerId("w1"), ONE, prompt)
    assert real.lookup(prompt) == {("w1", ONE): 3}
    assert real.blocks == 3
    real.check_integrity()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda real: setattr(real, "_blocks", real.blocks + 1), "the total is wrong"),
        (lambda real: setattr(real, "_blocks", real.blocks - 1), "the total is wrong"),
        (lambda real: setattr(real, "_max_blocks", real.blocks - 1), "the total is wrong"),
        (lambda real: real._counts.clear(), "counted blocks are not those of the requests"),
        (lambda real: real._own.settled.update(real._own.pending), "a request is pending and settled"),
    ],
    ids=["one too many", "one too few", "past the bound", "not counted", "pending and settled"],
)
def test_counts_that_contradict_the_requests_are_noticed(damage: Callable[[Speculation], object], what: str) -> None:
    real = speculation(ManualClock())
    real.expect("a", WorkerId("w1"), ONE, hashes([0, 1, 0]))
    real.check_integrity()
    damage(real)
    with pytest.raises(AssertionError, match=what):
        real.check_integrity()
