"""Test reservations of blocks, a peer's quota, and holds in audits."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.block_hash import HashRoot, chain
from tandem.core.clock import ManualClock
from tandem.core.ids import Attempt, GroupId, RequestId, TransferId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.ledger import BlockLedger, Holder, HoldKind, subject_of
from tandem.engine.engine import Engine
from tandem.engine.sim.runner import SimRunner
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.audit import MAX_BLOCKS, _refusal, list_holds
from tandem.workercore.block_reservation import BlockReservation, publish_prefix, reserve_prefix
from tandem.workercore.message_ring import DEFAULT_BYTES
from tandem.workercore.peer_block_quota import is_over
from tandem.workercore.requests import fetch_holder, fetch_name, is_fetch

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


def room(engine: Engine, blocks: int, *others: BlockReservation) -> BlockReservation | None:
    return reserve_prefix(engine, ME, HASHES[:blocks], others, is_whole=True)


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
    publish_prefix(engine, found)
    assert engine.hit_blocks(HASHES, is_whole=True) == 9
    assert all(ledger.counts().cached == 9 for ledger in engine.ledgers)
    engine.scheduler.check_integrity()


def test_given_up_before_it_is_verified(engine: Engine) -> None:
    have(engine, 0, 3)
    assert room(engine, 9) is not None
    engine.blocks.release_holder(ME)
    assert engine.ledgers[0].counts().cached == 3
    assert all(ledger.available == BLOCKS and not ledger.holders() for ledger in engine.ledgers)


def test_somebody_computed_the_same_meanwhile(engine: Engine) -> None:
    """The later copy is dropped."""
    found = room(engine, 5)
    for group in range(len(engine.ledgers)):
        have(engine, group, 5)
    assert found is not None
    publish_prefix(engine, found)
    assert all(ledger.counts().cached == 5 for ledger in engine.ledgers)
    engine.scheduler.check_integrity()


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
    first = reserve_prefix(engine, Holder(HoldKind.RESERVED, "first"), HASHES[:9], [])
    assert first is not None
    assert room(engine, 2, first) is None
    assert room(engine, 1, first) is not None


def test_names_tell_fetches_from_hand_overs() -> None:
    name = fetch_name(RequestId("chatcmpl-7"))
    assert is_fetch(name)
    assert not is_fetch("chatcmpl-7")
    subject = subject_of(fetch_holder(HoldKind.PUSHING, name, Attempt(2), TransferId(48213)))
    assert (subject.request, subject.attempt, subject.transfer) == (name, 2, 48213)


blocks = st.integers(0, 60)


def test_a_quarter_or_one_request() -> None:
    assert not is_over([0], [99], [100]), "one request, however large"
    assert not is_over([20], [5], [100])
    assert is_over([20], [6], [100])
    assert is_over([20, 1], [5, 5], [100, 20]), "in every group"


@given(st.lists(st.tuples(blocks, st.integers(1, 60), st.integers(1, 200)), min_size=1, max_size=3))
def test_granted_in_turn_a_peer_keeps_to_its_share(groups: list[tuple[int, int, int]]) -> None:
    """All fetches granted one after another: a quarter of every pool, or a single request."""
    _, needs, pools = (list(column) for column in zip(*groups, strict=True))
    held, granted = [0] * len(needs), 0
    while not is_over(held, needs, pools) and granted < 100:
        held = [have + need for have, need in zip(held, needs, strict=True)]
        granted += 1
    assert granted >= 1
    assert granted == 1 or granted == 100 or all(have <= size // 4 for have, size in zip(held, pools, strict=True))


def holding(prefix_blocks: int, holders: int) -> BlockLedger:
    """Holders that share one prefix."""
    ledger = BlockLedger(GroupId(0), prefix_blocks)
    prefix = ledger.allocate(Holder(HoldKind.REQUEST, "request-0#1#0"), prefix_blocks) or []
    for number in range(1, holders):
        ledger.share(Holder(HoldKind.REQUEST, f"request-{number}#1#0"), prefix)
    return ledger


def test_all_blocks_are_listed_where_they_fit() -> None:
    (one, two) = list_holds([holding(1000, 2)], max_blocks=2000)
    assert list(one.blocks) == list(two.blocks) == list(range(1000))


def test_many_holders_of_a_long_prefix_name_its_first_blocks() -> None:
    holds = list_holds([holding(1000, 20)], max_blocks=2000)
    assert [list(hold.blocks) for hold in holds] == [list(range(100))] * 20, "every hold stays visible"


def test_what_a_report_names_in_part_is_refused_with_the_reason() -> None:
    ledger = holding(MAX_BLOCKS // 200 + 1, 200)
    context: Any = SimpleNamespace(incarnation=1, engine=SimpleNamespace(ledgers=[ledger]))
    seen = list_holds([ledger])[0]
    assert "only the first of each hold" in _refusal(context, (), 1, seen)
    ledger.release(Holder(HoldKind.REQUEST, "request-199#1#0"))
    assert "no holder of this name" in _refusal(context, (), 1, seen), "a report names all of them now"


def test_as_many_blocks_as_are_listed_fit_the_ring() -> None:
    """Before, books of 200 requests behind one long prefix fitted no message, and the rank that was asked ended."""
    far = range(20_000_000, 20_000_000 + MAX_BLOCKS)  # ids of a pool of hundreds of millions of tokens
    report = w.AuditReport(holds=[w.AuditHold(kind="request", key="request#1#0", since_s=1.0, blocks=far)])
    assert report.ByteSize() < DEFAULT_BYTES // 2 - 1_000_000, "there is room for names"
