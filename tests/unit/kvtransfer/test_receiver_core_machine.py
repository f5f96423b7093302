"""Random histories of several transfers against a model: memory changes only by frames of the current attempt."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tandem.core.ids import GroupId, TransferId
from tandem.kvtransfer.events import Failed, Verified
from tandem.kvtransfer.frame import FrameKind, ReplyKind
from tests.unit.kvtransfer.conftest import Bench, control

FRAMES = [  # every cell of (block, layer) of one block of group 0, whole and in halves of heads
    *((range(layer, layer + 1), heads) for layer in range(3) for heads in (range(4), range(2), range(2, 4))),
    (range(3), range(4)),
]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.model = Bench()  # its memory gets what ought to be accepted
        self.missing: dict[int, set[tuple[int, int]]] = {}  # open transfers
        self.blocks: dict[int, int] = {}
        self.outcome: dict[int, str] = {}
        self.next = 1
        self.touched: set[int] = set()  # a byte was offered to them
        self.revoked: set[int] = set()

    @rule()
    def expect(self) -> None:
        if self.next <= 6:
            number, block = self.next, self.next % 8
            self.next += 1
            self.bench.intake.expect(self.bench.ticket(number, {0: (block,)}))
            self.missing[number] = {(layer, head) for layer in range(3) for head in range(4)}
            self.blocks[number] = block

    @rule(
        number=st.integers(1, 6),
        cut=st.sampled_from(FRAMES),
        attempt=st.sampled_from([1, 1, 1, 1, 2]),
        source=st.sampled_from([11, 11, 11, 11, 12]),
        flip=st.sampled_from([False] * 7 + [True]),
    )
    def push(self, number: int, cut: Any, attempt: int, source: int, flip: bool) -> None:
        layers, heads = cut
        frame, payload = self.bench.data(
            0, (self.blocks.get(number, 0),), layers, heads,
            transfer=TransferId(number), attempt=attempt, source_incarnation=source,
        )  # fmt: skip
        sent = bytes([payload[0] ^ 1]) + payload[1:] if flip else payload
        reply = self.bench.send(frame, sent)
        is_current = number in self.missing and attempt == 1 and source == 11
        cells = {(layer, head) for layer in layers for head in heads}
        if not is_current:
            assert reply.kind is ReplyKind.FAIL or self.outcome.get(number) == "verified" or number in self.revoked
            return
        self.touched.add(number)
        if not cells & self.missing[number]:
            return
        self.model.pools[GroupId(0)].write_from(frame.blocks, layers, heads, memoryview(sent))
        if flip:  # it lies in reserved blocks that are never read
            self._end(number, "failed")
            return
        self.missing[number] -= cells
        if not self.missing[number]:
            self._end(number, "verified")

    @rule(number=st.integers(1, 6))
    def finish(self, number: int) -> None:
        reply = self.bench.send(control(kind=FrameKind.FINISH, transfer=TransferId(number)))
        assert (reply.kind is ReplyKind.DONE) == (self.outcome.get(number) == "verified")
        if number in self.missing:
            self._end(number, "failed")

    @rule(number=st.integers(1, 6))
    def cancel(self, number: int) -> None:
        self.bench.intake.cancel(TransferId(number))
        self.missing.pop(number, None)

    @rule(number=st.integers(1, 6))
    def revoke(self, number: int) -> None:
        is_revoked = self.bench.intake.revoke(TransferId(number))
        assert is_revoked == (number in self.missing and number not in self.touched)
        if is_revoked:
            del self.missing[number]
            self.revoked.add(number)

    @invariant()
    def open_transfers_are_listed(self) -> None:
        failed = {number for number, outcome in self.outcome.items() if outcome == "failed"}
        listed = {t.transfer for t in self.bench.intake.transfers() if t.phase != "verified"} - failed
        assert listed == set(self.missing)

    @invariant()
    def memory_is_the_models(self) -> None:
        assert self.bench.image() == self.model.image()

    @invariant()
    def each_outcome_was_told_once(self) -> None:
        told = {e.transfer: "verified" if isinstance(e, Verified) else "failed" for e in self.bench.events}
        assert len(told) == len(self.bench.events)
        assert told == self.outcome
        assert all(isinstance(e, Verified | Failed) for e in self.bench.events)

    def _end(self, number: int, outcome: str) -> None:
        self.outcome[number] = outcome
        del self.missing[number]


@pytest.mark.parametrize("steps", [30])
def test_random_histories(steps: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(stateful_step_count=steps, max_examples=60, deadline=None),
    )
