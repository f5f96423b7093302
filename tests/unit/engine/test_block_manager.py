"""Blocks of sequences in several groups: all or nothing, one writer a block."""

import pytest

from tandem.core.errors import ConfigError
from tandem.core.ids import GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.ledger import Holder, HoldKind, LedgerError
from tandem.engine.block_manager import BlockSpace
from tandem.engine.sequence import QueueState, RequestState
from tests.unit.engine.arithmetic import layout, make_request, tokens

PUSH = Holder(HoldKind.PUSHING, "push")


def state_of(prompt: int = 6, n: int = 1, groups: int = 2, key: str = "a") -> RequestState:
    return RequestState(make_request(key, tokens(prompt), 8, n=n), (), (0.0, 1), groups)


def test_admission_takes_blocks_in_every_group_or_in_none() -> None:
    space = BlockSpace(layout(2), (8, 2))
    state = state_of(prompt=9)
    assert not space.admit(state, 0)
    assert [ledger.counts().free for ledger in space.ledgers] == [8, 2]
    assert space.admit(state_of(prompt=8), 0)
    assert [ledger.counts().request for ledger in space.ledgers] == [2, 2]


def test_admission_leaves_the_headroom() -> None:
    space = BlockSpace(layout(1), (4,))
    assert not space.admit(state_of(groups=1), 3)
    assert space.admit(state_of(groups=1), 2)


def test_cached_hits_are_not_counted_as_room() -> None:
    """All free room is the cached prefix itself: sharing it leaves nothing for the rest of the prompt."""
    space = BlockSpace(layout(1), (3,))
    first = state_of(prompt=12, groups=1)
    assert space.admit(first, 0)
    first.leader.computed = 12
    space.publish(first, first.leader)
    space.release(first)
    assert not space.admit(state_of(prompt=13, groups=1), 0)
    assert space.ledgers[0].counts().cached == 3
    assert space.admit(state_of(prompt=12, groups=1), 0)
    assert space.ledgers[0].counts().cached == 0


def test_a_prompt_is_written_in_place_while_it_is_pushed() -> None:
    """The sender reads the blocks named to it; they must not be swapped for copies under it."""
    space = BlockSpace(layout(1), (8,))
    state = state_of(prompt=7, groups=1)
    assert space.admit(state, 0)
    table = list(state.leader.tables[0])
    space.ledgers[0].share(PUSH, table)
    state.leader.computed = 2
    assert space.extend(state, state.leader, 7) == []
    assert state.leader.tables[0] == table
    state.leader.computed = 7
    (copy,) = space.extend(state, state.leader, 8) or []
    assert (copy.source, copy.target) == (table[1], state.leader.tables[0][1])


def test_the_last_writer_keeps_the_original() -> None:
    space = BlockSpace(layout(2), (8, 9))
    state = state_of(n=3)
    assert space.admit(state, 0)
    state.leader.computed = 6
    space.fork(state, state.leader)
    copies = [space.extend(state, sequence, 7) for sequence in state.sequences]
    assert [len(made or []) for made in copies] == [2, 2, 0]
    assert [ledger.counts().request for ledger in space.ledgers] == [4, 4]
    tails = {sequence.tables[0][1] for sequence in state.sequences}
    assert len(tails) == 3
    space.release_sequence(state.sequences[1])
    space.release(state)
    assert [ledger.counts().free for ledger in space.ledgers] == [8, 9]


def test_too_few_blocks_change_nothing() -> None:
    space = BlockSpace(layout(2), (2, 3))
    state = state_of(prompt=8)
    assert space.admit(state, 0)
    state.leader.computed = 8
    assert space.extend(state, state.leader, 9) is None
    assert [ledger.counts().free for ledger in space.ledgers] == [0, 1]
    assert [len(table) for table in state.leader.tables] == [2, 2]


def test_groups_must_agree_on_the_block_size() -> None:
    specs = tuple(
        KVGroupSpec(group=GroupId(g), layers=(g,), planes=2, heads=1, width=1, block_tokens=4 + g, dtype="float32")
        for g in range(2)
    )
    with pytest.raises(ConfigError, match="block size"):
        BlockSpace(KVLayout(groups=specs), (4, 4))
    with pytest.raises(ConfigError, match="pools"):
        BlockSpace(layout(2), (4,))


def test_check_integrity_sees_a_table_that_disagrees() -> None:
    space = BlockSpace(layout(1), (8,))
    state = state_of(groups=1)
    assert space.admit(state, 0)
    with pytest.raises(LedgerError, match="waits but holds"):
        space.check_integrity([state])
    state.place = QueueState.RUNNING
    space.check_integrity([state])
    with pytest.raises(LedgerError, match="no known request"):
        space.check_integrity([])
    state.leader.tables[0].pop()
    with pytest.raises(LedgerError, match="disagree"):
        space.check_integrity([state])
