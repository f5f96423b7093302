"""Blocks that a fetch may take, and their way into the cache, in one KV group and in two."""

from __future__ import annotations

import pytest

from tandem.core.block_hash import HashRoot, chain
from tandem.core.clock import ManualClock
from tandem.core.holder_keys import subject_of
from tandem.core.ids import Attempt, GroupId, RequestId, TransferId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.ledger import Holder, HoldKind
from tandem.engine.engine import Engine
from tandem.engine.sim.runner import SimRunner
from tandem.workercore.fetch_names import fetch_holder, fetch_name, is_fetch
from tandem.workercore.fetch_reservation import FetchRoom, keep, reserve

BLOCKS, SIZE = 40, 4
HASHES = chain(HashRoot(fingerprint="f", block_tokens=SIZE).digest(), range(100), SIZE)
ME, OTHER = Holder(HoldKind.RESERVED, "fetch~r#1/7"), Holder(HoldKind.REQUEST, "other#1#0")


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Engine:
    groups = tuple(
        KVGroupSpec(group=GroupId(g), layers=(g,), planes=2, heads=1, width=8, block_tokens=SIZE, dtype="float32")
        for g in range(request.param)
    )
    clock = ManualClock()
    runner = SimRunner(
        KVLayout(groups=groups), [BLOCKS] * request.param, vocab_size=100, eos_token_ids=(1,), max_model_len=100,
        layer_group=1, clock=clock,
    )  # fmt: skip
    return Engine(runner, clock=clock)


def have(engine: Engine, group: int, count: int) -> None:
    """The first `count` blocks are cached in a group."""
    ledger, holder = engine.ledgers[group], Holder(HoldKind.REQUEST, "earlier#1#0")
    for block, block_hash in zip(ledger.allocate(holder, count) or (), HASHES, strict=False):
        ledger.publish(block, block_hash)
    ledger.release(holder)


def taken(engine: Engine, count: int) -> None:
    for ledger in engine.ledgers:
        assert ledger.allocate(OTHER, count) is not None


def room(engine: Engine, blocks: int, *others: FetchRoom) -> FetchRoom | None:
    return reserve(engine, ME, HASHES[:blocks], others, is_whole=True)


def test_only_what_lacks_is_received(engine: Engine) -> None:
    for group in range(len(engine.ledgers)):
        have(engine, group, 3 + group)
    assert engine.hit_blocks(HASHES, is_whole=True) == 3
    found = room(engine, 9)
    assert found is not None
    assert [group.skip for group in found.groups] == [3, 4][: len(engine.ledgers)]
    assert [len(group.blocks) for group in found.groups] == [6, 5][: len(engine.ledgers)]
    assert found.gained_blocks == 6
    assert engine.hit_blocks(HASHES, is_whole=True) == 3, "nobody finds what is not verified"
    keep(engine, found)
    assert engine.hit_blocks(HASHES, is_whole=True) == 9
    assert all(ledger.counts().cached == 9 for ledger in engine.ledgers)
    engine.check_integrity()


def test_given_up_before_it_is_verified(engine: Engine) -> None:
    have(engine, 0, 3)
    assert room(engine, 9) is not None
    engine.release_holder(ME)
    assert engine.ledgers[0].counts().cached == 3
    assert all(ledger.available == BLOCKS and not ledger.holders() for ledger in engine.ledgers)


def test_somebody_computed_the_same_meanwhile(engine: Engine) -> None:
    """The later copy is dropped."""
    found = room(engine, 5)
    for group in range(len(engine.ledgers)):
        have(engine, group, 5)
    assert found is not None
    keep(engine, found)
    assert all(ledger.counts().cached == 5 for ledger in engine.ledgers)
    engine.check_integrity()


def test_what_runs_may_grow_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(engine, BLOCKS - 9)
    monkeypatch.setattr(type(engine), "growth_blocks", property(lambda self: 2))
    assert room(engine, 8) is None
    assert all(ME not in ledger.holders() for ledger in engine.ledgers)
    assert room(engine, 7) is not None


def test_who_waits_for_blocks_comes_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine), "is_short_of_blocks", property(lambda self: True))
    assert room(engine, 1) is None


def test_one_fetch_or_a_quarter(engine: Engine) -> None:
    first = reserve(engine, Holder(HoldKind.RESERVED, "first"), HASHES[:9], [])
    assert first is not None
    assert room(engine, 2, first) is None
    assert room(engine, 1, first) is not None


def test_names_tell_fetches_from_hand_overs() -> None:
    name = fetch_name(RequestId("chatcmpl-7"))
    assert is_fetch(name)
    assert not is_fetch("chatcmpl-7")
    subject = subject_of(fetch_holder(HoldKind.PUSHING, name, Attempt(2), TransferId(48213)))
    assert (subject.request, subject.attempt, subject.transfer) == (name, 2, 48213)
