"""Ends of requests without a cancel: deadlines in every phase, a lost lease, a failed step, too few blocks."""

from pathlib import Path
from typing import Any

import pytest

from tandem.core.block_hash import BlockHash
from tandem.core.errors import InternalError
from tandem.core.ids import GroupId, new_incarnation
from tandem.core.ledger import Holder, HoldKind
from tandem.engine.request import CacheEvent, StepResult
from tandem.rpc.v1 import engine_pb2 as e
from tests.integration.worker.loopback import Loopback, Rank, prompt_of
from tests.integration.worker.pair import MODEL


def expire(rank: Rank) -> None:
    for tracked in rank.context.requests.all():
        tracked.deadline_s = 0.0


@pytest.mark.drawn(5)
@pytest.mark.parametrize("turns", [1, 2, 3, 4, 6, 9, 15])
@pytest.mark.parametrize("first", ["p", "d"])
def test_deadlines_in_every_phase(loopback: Loopback, turns: int, first: str) -> None:
    """The other end need not wait for its own."""
    loopback.submit("r", prompt_of(200), max_tokens=2000, ignore_eos=True)
    for _ in range(turns):
        loopback.turn()
    ranks = [loopback.p, loopback.d]
    expire(ranks["pd".index(first)])
    for _ in range(5):
        loopback.turn()
    expire(ranks[1 - "pd".index(first)])
    loopback.rest_at_baseline()
    assert "deadline_exceeded" in {failure.code for failure in loopback.failed["r"]}


def lapse(rank: Rank) -> None:
    rank._pulse.grant(rank.context.clock.now_s() - 1)


def renew(rank: Rank) -> None:
    rank._pulse.grant(rank.context.clock.now_s() + 60)


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_lost_thread_ends_the_rank_at_once(loopback: Loopback, has_lease: bool) -> None:
    """Also past its lease: it may never come back, and the reason would be lost."""
    if not has_lease:
        lapse(loopback.d)
    loopback.d.inbox.post(InternalError("a thread is lost"))
    with pytest.raises(InternalError, match="a thread is lost"):
        loopback.d.loop.turn(max_wait_s=0.001)


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_thread_that_is_lost_in_a_step_ends_the_rank_after_it(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch, has_lease: bool
) -> None:
    """Inside it would only fail the step's requests."""
    rank = loopback.p
    step = rank.context.engine.step

    def lose(hook: Any) -> StepResult:
        rank.inbox.post(InternalError("a thread is lost"))
        result = step(hook)
        if not has_lease:
            lapse(rank)
        return result

    monkeypatch.setattr(rank.context.engine, "step", lose)
    loopback.submit("r", prompt_of(60), max_tokens=2)
    rank.loop.turn(max_wait_s=0.001)
    with pytest.raises(InternalError, match="a thread is lost"):
        rank.loop.turn(max_wait_s=0.001)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("end", ["p", "d"])
def test_nothing_is_done_without_a_lease(loopback: Loopback, turns: int, end: str) -> None:
    """A rank past its lease stands still; when the lease comes back, the answer goes on as if nothing had been."""
    loopback.submit("whole", prompt_of(200), max_tokens=12, ignore_eos=True)
    loopback.run_until_rest(2000)
    loopback.submit("r", prompt_of(200), max_tokens=12, ignore_eos=True)
    for _ in range(turns):
        loopback.turn()
    rank = loopback.p if end == "p" else loopback.d
    lapse(rank)
    steps, said = rank.context.counters.get("steps"), len(loopback.chunks["r"][0])
    for _ in range(20):
        rank.loop.turn(max_wait_s=0.001)
        assert not rank.sent
    assert rank.context.counters.get("steps") == steps
    assert len(loopback.chunks["r"][0]) == said
    renew(rank)
    loopback.rest_at_baseline()
    assert loopback.tokens("r") == loopback.tokens("whole")


@pytest.mark.parametrize("is_renewed", [True, False], ids=["same incarnation", "another"])
@pytest.mark.parametrize("leg", ["p", "d"])
def test_a_lease_that_lapses_during_a_step(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch, leg: str, is_renewed: bool
) -> None:
    """Its tokens wait; with the same incarnation they are sent, with another one their requests are void."""
    is_whole = leg == "d"
    loopback.submit("r", prompt_of(40), max_tokens=20, ignore_eos=True, is_whole=is_whole)
    rank = loopback.d if is_whole else loopback.p
    execute = rank.context.engine._execute

    def lapsing(*arguments: Any) -> Any:
        lapse(rank)
        return execute(*arguments)

    monkeypatch.setattr(rank.context.engine, "_execute", lapsing)
    rank.loop.turn(max_wait_s=0.01)
    monkeypatch.undo()
    said = [message for message in rank.sent if message.router.message.HasField("tokens") or message.HasField("peer")]
    assert not said
    if not is_renewed:
        rank.incarnation = new_incarnation()
        rank.deliver(e.HostToRank(incarnation=e.NewIncarnation(incarnation=rank.incarnation)))
    renew(rank)
    if not is_renewed:
        loopback.turn()
        loopback.cancel("r")
    loopback.rest_at_baseline()
    assert len(loopback.tokens("r")) == (20 if is_renewed else len(loopback.chunks["r"][0]))
    if not is_renewed:
        assert {failure.code for failure in loopback.failed["r"]} == {"cancelled"}


def test_a_failed_step_ends_its_requests(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    loopback.submit("r", prompt_of(40), max_tokens=20, ignore_eos=True)
    while "requests_admitted" not in loopback.d.context.counters:
        monkeypatch.setattr(loopback.d.context.engine, "_execute", _broken)
        loopback.turn()
    loopback.rest_at_baseline()
    assert {failure.code for failure in loopback.failed["r"]} == {"internal"}
    assert loopback.d.role._handoffs == {}  # type: ignore[attr-defined]


def test_a_preempted_request_returns_before_a_ticket_is_granted(folder: Path) -> None:
    """Else a steady stream of hand-overs takes every block that comes back."""
    pair = Loopback(folder, MODEL, transport="shm", kv_memory_bytes=30 * 16 * 5120, max_model_len=400)
    (ledger,) = pair.d.context.engine.ledgers
    pair.submit("a", prompt_of(100, 3), max_tokens=120, ignore_eos=True)
    pair.submit("b", prompt_of(100, 4), max_tokens=120, ignore_eos=True)
    while pair.d.context.counters.get("requests_admitted", 0) < 2:
        pair.turn()
    other = Holder(HoldKind.RESERVED, "a test")
    taken = ledger.allocate(other, ledger.available)
    assert taken is not None
    while "preemptions" not in pair.d.context.counters or not pair.d.context.counters["preemptions"]:
        pair.turn()
    pair.submit("c", prompt_of(20, 5), max_tokens=4, ignore_eos=True)
    for _ in range(5):
        pair.turn()
    assert pair.d.context.engine.is_short_of_blocks
    assert ledger.available >= 2
    assert pair.d.context.counters["requests_admitted"] == 2
    ledger.release(other)
    pair.rest_at_baseline()
    assert [len(pair.tokens(name)) for name in "abc"] == [120, 120, 4]
    pair.close()


def test_evicting_a_large_pool_fits_the_ring(loopback: Loopback) -> None:
    """Block events of a whole pool leave in pieces."""
    rank = loopback.d
    for index in range(30_000):
        rank.context.engine.blocks._events.append(_event(index))
    rank.loop.turn(max_wait_s=0.0)
    sizes = [len(m.events.events) for m in rank.sent if m.HasField("events")]
    assert sum(sizes) == 30_000
    assert max(m.ByteSize() for m in rank.sent) < 1 << 20


def _broken(*_: object) -> None:
    raise InternalError("a broken step")


def _event(index: int) -> CacheEvent:
    return CacheEvent(is_stored=True, group=GroupId(0), hash=BlockHash(index.to_bytes(16, "little")))
