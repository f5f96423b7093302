"""A pair of ledgers and the contents of their blocks: under any interleaving of pushes, cancels and evictions, a
block's content is right for its readers.

The rules hold and let go as the roles do: the source is shared with the push for as long as it may be read, the
destination is reserved until it is admitted or fenced. Contents are numbers; a block that changes hands is
scribbled over.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tandem.core.block_hash import BlockHash
from tandem.core.ids import BlockId, GroupId
from tandem.core.ledger import BlockLedger, Holder, HoldKind
from tests.unit.simulation.budget import budget

PROMPTS = ((1,), (1, 2), (1, 2, 3), (1, 4), (5, 6, 7, 8))
"""The contents of a prompt's blocks; common beginnings are common prefixes."""
WHICH = st.integers(0, 12)


@dataclass
class Side:
    """A ledger and its pool."""

    blocks: int
    ledger: BlockLedger = field(init=False)
    content: dict[BlockId, int] = field(default_factory=dict)
    scribbles: itertools.count[int] = field(default_factory=lambda: itertools.count(-1, -1))

    def __post_init__(self) -> None:
        self.ledger = BlockLedger(GroupId(0), self.blocks)

    def take(self, holder: Holder, prompt: tuple[int, ...]) -> tuple[list[BlockId], int] | None:
        """Pin what is cached of the prompt and allocate the rest, as reservations and the engine do."""
        matched = self.ledger.match([_hash(prompt[: i + 1]) for i in range(len(prompt))])
        self.ledger.share(holder, matched)
        new = self.ledger.allocate(holder, len(prompt) - len(matched))
        if new is None:
            self.ledger.release(holder)
            return None
        for block in new:
            self.content[block] = next(self.scribbles)
        return [*matched, *new], len(matched)

    def publish(self, prompt: tuple[int, ...], table: list[BlockId]) -> None:
        for index, block in enumerate(table):
            assert self.content[block] == prompt[index], "a block is published with another content"
            self.ledger.publish(block, _hash(prompt[: index + 1]))


@dataclass
class Move:
    """One request on its way: computed at the source, pushed block by block, admitted or given up."""

    number: int
    prompt: tuple[int, ...]
    source: list[BlockId]
    is_source_kept: bool = True
    target: list[BlockId] = field(default_factory=list)
    skip: int = 0
    pushed: int = 0
    is_open: bool = False
    is_admitted: bool = False
    flying: list[tuple[BlockId, int]] = field(default_factory=list)

    def holder(self, kind: HoldKind) -> Holder:
        return Holder(kind, f"r{self.number}#1/{self.number}")


class Ledgers(RuleBasedStateMachine):
    """`moves` lives from the first computed block to the last held one."""

    @initialize(source_blocks=st.sampled_from([5, 9]), target_blocks=st.sampled_from([4, 9]))
    def start(self, source_blocks: int, target_blocks: int) -> None:
        self.source, self.target = Side(source_blocks), Side(target_blocks)
        self.moves: list[Move] = []
        self.numbers = itertools.count()

    @rule(prompt=st.sampled_from(PROMPTS))
    def compute(self, prompt: tuple[int, ...]) -> None:
        move = Move(next(self.numbers), prompt, [])
        taken = self.source.take(move.holder(HoldKind.REQUEST), prompt)
        if taken is None:
            return
        move.source, cached = taken
        for index in range(cached, len(prompt)):
            self.source.content[move.source[index]] = prompt[index]
        self.source.publish(prompt, move.source)
        self.moves.append(move)

    @rule(which=WHICH)
    def grant(self, which: int) -> None:
        move = self._one(which, [m for m in self.moves if not m.target and m.is_source_kept])
        if move is None:
            return
        taken = self.target.take(move.holder(HoldKind.RESERVED), move.prompt)
        if taken is None:
            return
        move.target, move.skip = taken
        move.pushed, move.is_open = move.skip, True
        self.source.ledger.share(move.holder(HoldKind.PUSHING), move.source)

    @rule(which=WHICH)
    def let_go_of_the_request(self, which: int) -> None:
        """The request at the source is over (cancelled, or its first token was all); a push may go on reading."""
        move = self._one(which, [m for m in self.moves if m.is_source_kept])
        if move is not None:
            move.is_source_kept = False
            self.source.ledger.release(move.holder(HoldKind.REQUEST))

    @rule(which=WHICH, count=st.integers(1, 4))
    def push(self, which: int, count: int) -> None:
        """Read at the source; it lands later."""
        move = self._one(which, [m for m in self.moves if m.is_open])
        if move is not None:
            for index in range(move.pushed, min(move.pushed + count, len(move.prompt))):
                move.flying.append((move.target[index], self.source.content[move.source[index]]))
                move.pushed = index + 1

    @rule(which=WHICH)
    def land(self, which: int) -> None:
        move = self._one(which, [m for m in self.moves if m.is_open and m.flying])
        if move is not None:
            block, content = move.flying.pop()
            held = {held.holder for held in self.target.ledger.held() if block in held.blocks}
            assert held == {move.holder(HoldKind.RESERVED)}, "it lands in a block of somebody else"
            self.target.content[block] = content

    @rule(which=WHICH)
    def admit(self, which: int) -> None:
        """Everything is there: the reservation becomes the request's, its blocks can be found from now on."""
        ready = [m for m in self.moves if m.is_open and m.pushed == len(m.prompt) and not m.flying]
        move = self._one(which, ready)
        if move is None:
            return
        assert [self.target.content[block] for block in move.target] == list(move.prompt), "a wrong block is admitted"
        self.target.ledger.move(move.holder(HoldKind.RESERVED), move.holder(HoldKind.REQUEST))
        self.target.publish(move.prompt, move.target)
        self.source.ledger.release(move.holder(HoldKind.PUSHING))
        move.is_open, move.is_admitted = False, True

    @rule(which=WHICH)
    def give_up(self, which: int) -> None:
        """Fence first (nothing that flies lands any more), then both ends let go."""
        move = self._one(which, [m for m in self.moves if m.is_open])
        if move is not None:
            move.is_open, move.flying = False, []
            self.target.ledger.release(move.holder(HoldKind.RESERVED))
            self.source.ledger.release(move.holder(HoldKind.PUSHING))
            move.target = []

    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        move = self._one(which, [m for m in self.moves if m.is_admitted])
        if move is not None:
            self.target.ledger.release(move.holder(HoldKind.REQUEST))
            move.is_admitted = False

    @rule(at_source=st.booleans(), count=st.integers(1, 4))
    def pass_by(self, at_source: bool, count: int) -> None:
        """Another holder takes blocks, writes into them and leaves: cached blocks are lost."""
        side, holder = (self.source if at_source else self.target), Holder(HoldKind.REQUEST, "other#1#0")
        for block in side.ledger.allocate(holder, count) or []:
            side.content[block] = next(side.scribbles)
        side.ledger.release(holder)

    @invariant()
    def every_view_agrees(self) -> None:
        if not hasattr(self, "moves"):
            return
        for side in (self.source, self.target):
            side.ledger.check_integrity()
        for move in self.moves:
            if move.is_open or move.is_source_kept:
                assert [self.source.content[b] for b in move.source] == list(move.prompt), (
                    "a source changed under a push"
                )
            if move.is_admitted:
                assert [self.target.content[b] for b in move.target] == list(move.prompt), "an admitted block changed"

    def teardown(self) -> None:
        if not hasattr(self, "moves"):
            return
        for _ in self.moves:
            for end in (self.let_go_of_the_request, self.give_up, self.finish):
                end(which=0)
        for side in (self.source, self.target):
            side.ledger.check_integrity()
            assert side.ledger.holders() == {}
            assert side.ledger.available == side.blocks

    def _one(self, which: int, of: list[Move]) -> Move | None:
        return of[which % len(of)] if of else None


def _hash(tokens: tuple[int, ...]) -> BlockHash:
    return BlockHash(bytes(tokens).ljust(16, b"."))


def test_contents_stay_right_in_both_ledgers() -> None:
    run_state_machine_as_test(Ledgers, settings=budget(examples=200, steps=50))
