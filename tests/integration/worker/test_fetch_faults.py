"""Under any fault of a fetch, its request is answered, and both ends release every block."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.core import metric_names as names
from tandem.core.ids import GroupId, new_incarnation
from tandem.core.ledger import Holder, HoldKind
from tandem.kvtransfer.state import TransferPhase
from tandem.router.admin.block_hold_audit import Auditor, HoldVerdict, Judged
from tandem.router.admin.kv_audit_handlers import books_from_wire
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore import audit
from tandem.workercore.prefix_client import CEILING_S
from tests.integration.worker.fetchcase import HELD, PROMPT, ends_well, fetch, fetch_mid_copy, lease_passes, reasons
from tests.integration.worker.loopback import Rank
from tests.integration.worker.trio import Trio, losing

TURNS = list(range(9))


# ---- death ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", TURNS)
def test_the_holder_dies(trio: Trio, turns: int) -> None:
    fetch(trio)
    trio.turn(turns)
    trio.gone("d0")
    ends_well(trio)


@pytest.mark.parametrize("turns", TURNS)
def test_the_requester_dies(trio: Trio, turns: int) -> None:
    fetch(trio)
    trio.turn(turns)
    trio.gone("d1")
    trio.rest_at_baseline()


@pytest.mark.parametrize("dies", ["d0", "d1"])
def test_death_between_two_frames(trio: Trio, monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    fetch_mid_copy(trio, monkeypatch)
    trio.gone(dies)
    trio.rest_at_baseline()
    if dies == "d0":
        trio.check("r", PROMPT)
        assert trio.count("d1", names.FETCHES) == 0
        assert trio.count("d1", "prefill_tokens") == len(PROMPT)


def test_another_holder_takes_over(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    trio.serve("there", PROMPT, "d2")
    fetch_mid_copy(trio, monkeypatch, "d0", "d2")
    trio.gone("d0")
    ends_well(trio)
    assert trio.count("d1", names.FETCHED_TOKENS) == HELD
    assert trio.count("d1", "prefill_tokens") == len(PROMPT) - HELD


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("end", ["d0", "d1"])
def test_a_new_incarnation(trio: Trio, turns: int, end: str) -> None:
    fetch(trio)
    trio.turn(turns)
    rank = trio[end]
    older, rank.incarnation = rank.incarnation, new_incarnation()
    rank.deliver(e.HostToRank(incarnation=e.NewIncarnation(incarnation=rank.incarnation)))
    for other in ("d0", "d1"):  # its host has closed every channel
        gone = e.PeerGone(worker=end, incarnation=older, reason="closed")
        if other != end:
            trio[other].deliver(e.HostToRank(peer_gone=gone))
    trio.rest_at_baseline()
    if end == "d0":
        trio.check("r", PROMPT)
    else:
        assert trio.failed["r"] or len(trio.got["r"]) == 4


def test_what_an_older_incarnation_offered_is_unpinned(trio: Trio) -> None:
    """At once, with or without messages of its requester."""
    trio.fate = losing("ticket", "failed")
    fetch(trio)
    trio.run_until(lambda: trio.has_said("d1", "ticket"))
    rank = trio["d0"]
    assert rank.context.engine.ledgers[0].counts().pushing
    rank.incarnation = new_incarnation()
    rank.deliver(e.HostToRank(incarnation=e.NewIncarnation(incarnation=rank.incarnation)))
    trio.turn()
    rank.check_baseline()
    trio.clock.skip(CEILING_S)
    ends_well(trio)


def test_an_older_incarnation_is_not_asked(trio: Trio) -> None:
    """The router's advice is of before the holder restarted."""
    stale = w.WorkerRef(worker="d0", incarnation=new_incarnation(), address="loopback")
    trio.submit("r", PROMPT, "d1")
    submit = trio["d1"].inbox.take(0.0)[0]
    assert isinstance(submit, e.HostToRank)
    submit.router.message.submit.sources.append(w.PrefixSource(worker=stale, tokens=HELD))
    trio["d1"].deliver(submit)
    ends_well(trio)
    assert reasons(trio) == {"refused"}


# ---- what the holder has -------------------------------------------------------------------------------------------


def test_the_holder_has_evicted_the_blocks(trio: Trio) -> None:
    trio["d0"].context.engine.ledgers[0].evict_cached()
    fetch(trio)
    ends_well(trio)
    assert reasons(trio) == {"refused"}
    assert not trio.has_said("d1", "ticket")


def test_what_is_offered_is_not_evicted(trio: Trio) -> None:
    """Between offer and ticket the holder's whole cache is taken by others, but for what it offered."""
    kept: list[tuple[Rank, w.PeerMessage]] = []

    def keep_tickets(rank: Rank, message: w.PeerMessage) -> int:
        if message.HasField("ticket"):
            kept.append((rank, message))
        return int(not message.HasField("ticket"))

    trio.fate = keep_tickets
    fetch(trio)
    trio.run_until(lambda: bool(kept))
    ledger, others = trio["d0"].context.engine.ledgers[0], Holder(HoldKind.REQUEST, "others")
    assert ledger.counts().pushing == HELD // 16
    assert ledger.allocate(others, ledger.available) is not None
    trio.fate = losing()
    for rank, message in kept:
        trio.deliver(rank, trio["d0"], message)
    trio.run_until(lambda: trio.count("d1", names.FETCHES) == 1)
    ledger.release(others)
    ends_well(trio)
    assert trio.count("d1", "prefill_tokens") == len(PROMPT) - HELD


def test_a_holder_that_is_short_offers_nothing(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(trio["d0"].context.engine), "is_short_of_blocks", property(lambda engine: True))
    fetch(trio)
    ends_well(trio)
    assert reasons(trio) == {"refused"}
    assert trio.count("d0", names.SUPPLIES) == 0


def test_a_requester_without_room_computes(trio: Trio) -> None:
    """The blocks left are enough for the request in the end, but not for a reservation beside those that run."""
    ledger, others = trio["d1"].context.engine.ledgers[0], Holder(HoldKind.REQUEST, "others")
    assert ledger.allocate(others, ledger.num_blocks - 20) is not None
    fetch(trio)
    trio.run_until(lambda: "no_room" in reasons(trio))
    ledger.release(others)
    ends_well(trio)
    assert not trio.has_said("d1", "ticket")


def test_fetches_together_take_a_quarter(folder: Path) -> None:
    """Nine requests that each want 8 blocks more: together they reserve 32 of 128, later ones compute."""
    with closing(Trio(folder, ("d0", "d1"))) as trio:
        prompts = [[(seed * 977 + 31 * i * i) % 4000 + 10 for i in range(140)] for seed in range(9)]
        for number, prompt in enumerate(prompts):
            trio.serve(f"w{number}", prompt, "d0")
        trio.fate = losing("ticket")
        for number, prompt in enumerate(prompts):
            trio.submit(f"r{number}", prompt, "d1", sources=[("d0", 128)])
        trio.run_until(lambda: all(len(trio.got[f"r{number}"]) == 4 for number in range(4, 9)))
        assert trio["d1"].context.engine.ledgers[0].counts().reserved == 32
        trio.fate = losing()
        trio.clock.skip(CEILING_S)
        trio.run_until_rest()
        for number, prompt in enumerate(prompts):
            trio.check(f"r{number}", prompt)


def test_a_holder_pins_one_supply_or_a_quarter(trio: Trio) -> None:
    """A request fetches 37 of 128 blocks: another prompt's are offered when they are sent, not before."""
    other = PROMPT[::-1]
    trio.serve("other", other, "d0")
    trio.fate = losing("ticket")
    fetch(trio)
    trio.run_until(lambda: trio.has_said("d1", "ticket"))
    trio.submit("s", other, "d2", sources=[("d0", HELD)])
    trio.run_until(lambda: len(trio.got["s"]) == 4)
    assert reasons(trio, "d2") == {"refused"}
    trio.fate = losing()
    trio.clock.skip(CEILING_S)
    ends_well(trio)
    trio.check("s", other)


# ---- cancel and deadlines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", TURNS)
def test_cancel_at_any_turn(trio: Trio, turns: int) -> None:
    fetch(trio)
    trio.turn(turns)
    trio.cancel("r")
    trio.rest_at_baseline()


def test_cancel_between_two_frames(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_mid_copy(trio, monkeypatch)
    trio.cancel("r")
    trio.rest_at_baseline()
    assert trio["d1"].context.engine.ledgers[0].counts().cached == 0, "what was not verified is no cache"


def test_a_late_fetch_is_fenced_before_its_blocks_go_back(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder is not informed, and goes on pushing into blocks that belong to others by then."""
    trio.fate = losing("failed")
    gate = fetch_mid_copy(trio, monkeypatch)
    transfer = trio["d1"].context.receiver.transfers()[0].transfer
    trio.clock.skip(CEILING_S)
    trio.run_until(lambda: reasons(trio) == {"late"})
    assert transfer not in [one.transfer for one in trio["d1"].context.receiver.transfers()]
    assert trio["d0"].context.sender.transfers()[0].phase is TransferPhase.PUSHING
    gate.open()
    trio.run_until(lambda: trio["d1"].context.receiver.counters()["dropped_fenced"] > 0)
    trio.run_until(lambda: not trio["d0"].context.sender.transfers())
    ends_well(trio)
    assert trio.count("d1", "prefill_tokens") == len(PROMPT)


@pytest.mark.parametrize("turns", TURNS[1:6])
def test_its_deadline_passes(trio: Trio, turns: int) -> None:
    trio.fate = losing("ticket")
    fetch(trio)
    trio.turn(turns)
    for tracked in trio["d1"].context.requests.all():
        tracked.deadline_s = 0.0
    trio.rest_at_baseline()
    assert [failure.code for failure in trio.failed["r"]] == ["deadline_exceeded"]


def test_half_of_a_short_deadline_is_left_to_compute(trio: Trio) -> None:
    trio.stalled.add("d0")
    trio.submit("r", PROMPT, "d1", sources=[("d0", HELD)], timeout_s=3)
    trio.turn()
    trio.clock.skip(1.6)
    trio.run_until(lambda: len(trio.got["r"]) == 4)
    assert reasons(trio) == {"late"}
    trio.stalled.clear()
    lease_passes(trio)
    ends_well(trio)


def test_a_router_that_left(trio: Trio) -> None:
    trio.fate = losing("ticket")
    fetch(trio)
    trio.run_until(lambda: trio.has_said("d1", "ticket"))
    trio["d1"].deliver(e.HostToRank(router_gone=e.RouterGone(router="test")))
    trio.rest_at_baseline()


# ---- bytes ---------------------------------------------------------------------------------------------------------


def test_a_wrong_byte_on_the_wire_is_not_used(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = trio["d0"].pools[GroupId(0)]
    read = pool.read_into
    monkeypatch.setattr(pool, "read_into", lambda *arguments: read(*arguments) ^ 1)  # its checksum
    fetch(trio)
    ends_well(trio)
    assert reasons(trio) <= {"transfer", "holder"}
    assert reasons(trio)
    assert trio.count("d1", "prefill_tokens") == len(PROMPT)


def test_the_link_breaks_between_two_frames(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_mid_copy(trio, monkeypatch)
    trio["d0"].context.sender._fail_all(lambda opened: True, "the link is down")  # type: ignore[attr-defined]
    ends_well(trio)
    assert trio.count("d1", names.FETCHES) == 0
    assert trio.count("d1", "prefill_tokens") == len(PROMPT)


# ---- audit and lease -----------------------------------------------------------------------------------------------


def books(rank: Rank) -> Any:
    return books_from_wire(audit.report(rank.context, rank.role.name, rank.loop.claims(), 1))


def judge(trio: Trio) -> list[Judged]:
    flights = {("r", 1), ("before", 1)}
    return Auditor(router="test", flights=flights, books=[books(rank) for rank in trio.ranks.values()]).judge()


def test_the_audit_explains_every_hold_of_a_fetch(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = fetch_mid_copy(trio, monkeypatch)
    for _ in range(20):
        trio.turn()
        judged = judge(trio)
        assert {one.hold.kind for one in judged} == {"pushing", "reserved"}
        assert {one.verdict for one in judged} == {HoldVerdict.EXPLAINED}, judged
    gate.open()
    while not trio.got["r"]:
        trio.turn()
        # One end may know before the other that all is sent; an event is on its way then.
        suspects = [one for one in judge(trio) if one.verdict is not HoldVerdict.EXPLAINED]
        assert all(one.hold.kind == "pushing" for one in suspects), suspects
    ends_well(trio)
    assert judge(trio) == []


@pytest.mark.parametrize("turns", TURNS[:7])
@pytest.mark.parametrize("end", ["d0", "d1"])
def test_nothing_is_done_without_a_lease(trio: Trio, turns: int, end: str) -> None:
    fetch(trio)
    trio.turn(turns)
    rank = trio[end]
    rank._pulse.grant(trio.clock.now_s() - 1)
    said = len(trio.said)
    for _ in range(20):
        rank.loop.turn(max_wait_s=0.001)
        assert not rank.sent
    assert len(trio.said) == said
    rank._pulse.grant(trio.clock.now_s() + 600)
    ends_well(trio)


@pytest.mark.parametrize("role", ["p0", "m0"])
def test_every_role_can_ask_and_supply(folder: Path, role: str) -> None:
    with closing(Trio(folder, (role, "d0", "d1"))) as trio:
        trio.serve("a", PROMPT, role)
        trio.serve("r", PROMPT, "d1", sources=[(role, HELD)])
        trio.check("r", PROMPT)
        assert trio.count("d1", names.FETCHED_TOKENS) == HELD
        trio[role].context.engine.ledgers[0].evict_cached()
        trio.serve("s", PROMPT, role, sources=[("d1", HELD)])
        trio.check("s", PROMPT)
        assert trio.count(role, names.FETCHED_TOKENS) == HELD
