"""Many prefill workers, one small decode worker: shares, turns, revoked tickets, forgotten transfers, no deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.core.lease_timing import LEASE_S
from tandem.core.ledger import Holder, HoldKind
from tandem.decode_worker import ticket_grants
from tandem.kvtransfer.leases import SAY_EVERY_S
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.crowd import Crowd
from tests.integration.worker.loopback import Rank


@contextmanager
def crowd(folder: Path, prefills: int, **settings: Any) -> Iterator[Crowd]:
    made = Crowd(folder, prefills, **settings)
    try:
        yield made
    finally:
        made.close()


def prompt_of(tokens: int, seed: int) -> list[int]:
    return [(seed * 977 + 7 * i * i + 31 * i) % 4000 + 10 for i in range(tokens)]


def reserved(pair: Crowd) -> dict[str, list[int]]:
    """Blocks of every unadmitted reservation at D, by peer."""
    found: dict[str, list[int]] = {}
    for reservation in pair.d.role._reservations.all():  # type: ignore[attr-defined]
        found.setdefault(reservation.peer, []).append(len(reservation.tables[0]))
    return found


def let_tickets_age(pair: Crowd) -> None:
    pair.clock.skip(ticket_grants.UNUSED_S + 0.1)


def test_one_peer_gets_a_quarter_while_others_wait(folder: Path) -> None:
    """Eight prompts of one peer asked first, when D was full; the other peer's two do not wait for all of them."""
    with crowd(folder, 2, d_blocks=32) as pair:
        pair.is_lost = lambda rank, message: message.HasField("complete")  # nothing is ever admitted
        ledger = pair.d.context.engine.ledgers[0]
        others = Holder(HoldKind.REQUEST, "others")
        assert ledger.allocate(others, 31) is not None
        for number in range(8):
            pair.submit(f"many{number}", 0, prompt_of(48, 10 + number))
        pair.run_until(lambda: pair.d.context.counters.get("tickets_queued") == 8)
        pair.submit("large", 1, prompt_of(144, 2))  # asks before the shorter one comes, which P would take first
        pair.run_until(lambda: pair.d.context.counters.get("tickets_queued") == 9)
        pair.submit("small", 1, prompt_of(48, 3))
        pair.run_until(lambda: pair.d.context.counters.get("tickets_queued") == 10)
        assert reserved(pair) == {}
        ledger.release(others)
        for _ in range(50):
            pair.turn()
        assert reserved(pair) == {"p0": [3, 3], "p1": [9]}, "a quarter is 8 blocks; one request may have more"
        pair.cancel("large")
        pair.run_until(lambda: reserved(pair).get("p1") == [3])
        pair.run_until(lambda: reserved(pair) == {"p0": [3] * 8, "p1": [3]}, 2000)  # no other request waits any more
        for request in pair.asked:
            pair.cancel(request)
        pair.run_until_rest()
        for rank in pair.ranks:
            rank.check_baseline()


def test_a_peer_alone_may_fill_the_pool(folder: Path) -> None:
    with crowd(folder, 2, d_blocks=32) as pair:
        pair.is_lost = lambda rank, message: message.HasField("complete")
        for number in range(8):
            pair.submit(f"many{number}", 0, prompt_of(48, number))
        pair.run_until(lambda: sum(reserved(pair).get("p0", [])) == 24, 2000)
        for request in pair.asked:
            pair.cancel(request)
        pair.run_until_rest()


def test_waiting_tickets_are_told_their_place(folder: Path) -> None:
    with crowd(folder, 1, d_blocks=12) as pair:
        for number in range(4):
            pair.submit(f"r{number}", 0, prompt_of(140, number), max_tokens=20)
        pair.run_until_rest()
        pair.check()
        assert pair.d.context.counters["tickets_queued"] >= 3
        assert pair.ps[0].context.counters["tickets_queued"] == pair.d.context.counters["tickets_queued"]
        assert pair.d.role._tickets._wait_per_place_s > 0  # type: ignore[attr-defined]


def test_a_ticket_that_nobody_uses_is_taken_back_and_asked_for_again(folder: Path) -> None:
    """P0 is busy with something else after it asked. P1's request takes its place; P0 waits in turn and answers."""
    with crowd(folder, 2, d_blocks=10) as pair:
        p0, p1 = pair.ps
        pair.submit("slow", 0, prompt_of(100, 1))
        pair.run_until(lambda: pair.has_said(p0, "ticket_request") == 1)
        pair.stalled.add("p0")
        pair.run_until(lambda: pair.has_said(pair.d, "ticket") == 1)
        pair.submit("quick", 1, prompt_of(100, 2))
        pair.run_until(lambda: pair.has_said(pair.d, "queued") == 1)
        for _ in range(20):
            pair.turn()
        assert pair.has_said(pair.d, "revoked") == 0, "not before its time"
        let_tickets_age(pair)
        pair.run_until(lambda: pair.d.context.counters.get("requests_admitted", 0) == 1)
        assert len(pair.got["quick"]) > 0
        assert pair.has_said(pair.d, "revoked") == 1
        pair.stalled.clear()
        pair.run_until_rest()
        pair.check()
        assert not pair.failed["slow"]
        assert not pair.failed["quick"]
        assert p0.context.counters["tickets_revoked"] == 1
        assert p1.context.counters.get("tickets_revoked", 0) == 0
        assert pair.has_said(p0, "ticket_request") == 2


def test_pushes_under_way_to_a_revoked_ticket_are_dropped(folder: Path) -> None:
    """The word of the revocation is late: P0 pushes all of it. Nothing lands; it pushes again under a new ticket."""
    with crowd(folder, 2, d_blocks=10) as pair:
        p0 = pair.ps[0]
        pair.submit("slow", 0, prompt_of(100, 1))
        late: list[w.PeerMessage] = []

        def hold_back(rank: Rank, message: w.PeerMessage) -> bool:
            if (message.HasField("ticket") and message.ticket.request == "slow") or message.HasField("revoked"):
                late.append(message)
                return True
            return False

        pair.is_lost = hold_back
        pair.run_until(lambda: len(late) == 1)
        pair.submit("quick", 1, prompt_of(100, 2))
        pair.run_until(lambda: pair.has_said(pair.d, "queued") == 1)
        let_tickets_age(pair)
        pair.run_until(lambda: len(late) == 2)
        pair.is_lost = lambda rank, message: False
        ticket, revoked = late
        _to(p0, pair.d, ticket)
        pair.run_until(lambda: pair.has_said(p0, "complete") == 1)
        pair.run_until(lambda: pair.d.context.receiver.counters()["dropped_fenced"] > 0)
        assert pair.ps[0].context.sender.transfers(), "a drop without a word does not end the transfer"
        _to(p0, pair.d, revoked)
        _to(p0, pair.d, revoked)  # and sent twice
        _to(p0, pair.d, ticket)
        pair.run_until_rest()
        pair.check()
        assert not pair.failed["slow"]
        assert pair.d.context.counters["completes_dropped"] == 1
        assert p0.context.counters["revocations_dropped"] == 1
        assert p0.context.counters["tickets_dropped"] == 1


def test_an_older_ticket_makes_the_youngest_running_request_wait(folder: Path) -> None:
    """The oldest request comes late to D, when younger ones run there: the youngest makes way, and all answer."""
    with crowd(folder, 3, d_blocks=14) as pair:
        pair.submit("old", 0, prompt_of(90, 1), max_tokens=3)
        pair.stalled.add("p0")
        for _ in range(3):
            pair.turn()
        for number in (1, 2):
            pair.submit(f"young{number}", number, prompt_of(60, 1 + number), max_tokens=60)
        pair.run_until(lambda: pair.d.context.counters.get("requests_admitted", 0) == 2)
        pair.stalled.clear()
        pair.run_until(lambda: pair.d.context.counters.get("requests_admitted", 0) == 3)
        assert pair.d.context.counters["preempted_for_tickets"] == 1
        pair.run_until_rest()
        pair.check()
        assert not any(pair.failed.values())


def test_a_ticket_that_got_lost_does_not_hold_blocks_for_ever(folder: Path) -> None:
    """P never received the transfer and reports so: after a lease D gives the blocks back, with the reason."""
    with crowd(folder, 1, d_blocks=32) as pair:
        pair.is_lost = lambda rank, message: message.HasField("ticket")
        pair.submit("r", 0, prompt_of(100, 1))
        pair.run_until(lambda: bool(reserved(pair)))
        pair.run_until(lambda: pair.has_said(pair.ps[0], "holding") > 0)
        for _ in range(5):
            pair.turn()
        pair.clock.skip(LEASE_S - 0.5)
        for _ in range(5):
            pair.turn()
        assert reserved(pair), "not before the lease is over"
        pair.clock.skip(SAY_EVERY_S)
        pair.run_until(lambda: not reserved(pair))
        assert pair.d.context.counters["transfers_forgotten"] == 1
        assert "no longer names" in pair.failed["r"][0].message
        pair.cancel("r")
        pair.run_until_rest()
        for rank in pair.ranks:
            rank.check_baseline()


def test_a_push_hold_whose_receiver_is_done_with_it_ends(folder: Path) -> None:
    """The word `verified` got lost: P's blocks come back a lease later, and the answer is not touched."""
    with crowd(folder, 1, d_blocks=32) as pair:
        pair.is_lost = lambda rank, message: message.HasField("verified")
        pair.submit("r", 0, prompt_of(100, 1), max_tokens=4)
        p = pair.ps[0]
        pair.run_until(lambda: len(pair.got["r"]) == 4)
        assert p.context.engine.ledgers[0].holders()
        pair.clock.skip(SAY_EVERY_S)
        pair.run_until(lambda: pair.has_said(pair.d, "holding") > 0)
        for _ in range(5):
            pair.turn()
        pair.clock.skip(LEASE_S)  # P names it, D answers that it has nothing
        pair.run_until(lambda: not p.context.engine.ledgers[0].holders())
        assert p.context.counters["transfers_forgotten"] == 1
        pair.run_until_rest()
        pair.failed.clear()  # P's leg failed; the answer had all come by then
        pair.check()


def test_slow_is_not_forgotten(folder: Path) -> None:
    """Both ends name a transfer that takes many leases: neither ends it."""
    with crowd(folder, 1, d_blocks=32) as pair:
        kept: list[w.PeerMessage] = []

        def keep(rank: Rank, message: w.PeerMessage) -> bool:
            if message.HasField("complete"):
                kept.append(message)
            return message.HasField("complete")

        pair.is_lost = keep
        pair.submit("r", 0, prompt_of(100, 1))
        pair.run_until(lambda: bool(kept))
        for _ in range(12):
            pair.clock.skip(SAY_EVERY_S)
            for _ in range(3):
                pair.turn()
        assert pair.has_said(pair.d, "holding") >= 12
        assert pair.has_said(pair.ps[0], "holding") >= 12
        pair.is_lost = lambda rank, message: False
        _to(pair.d, pair.ps[0], kept[0])
        pair.run_until_rest()
        pair.check()
        assert not pair.failed["r"]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(8))
def test_everybody_is_served(folder: Path, seed: int) -> None:
    """P's full of computed prompts that wait for tickets, a D that holds little more than one of them, P's that stand
    still with tickets in hand: every request is answered, by the oracle's tokens, and all blocks come back."""
    rng, cancelled = random.Random(seed), set[str]()
    with crowd(folder, 4, d_blocks=rng.choice([12, 14, 20]), p_blocks=rng.choice([12, 24]), max_sequences=8) as pair:
        for number in range(40):
            tokens = rng.choice([1, 16, 40, 90, 140])
            prompt = prompt_of(tokens, rng.randrange(6))
            pair.submit(f"r{number}", rng.randrange(4), prompt, max_tokens=rng.choice([2, 8, min(40, 158 - tokens)]))
            for _ in range(rng.randrange(4)):
                pair.turn()
            if rng.random() < 0.3:
                pair.stalled = set(rng.sample(["p0", "p1", "p2", "p3"], rng.randrange(4)))
            if rng.random() < 0.2:
                let_tickets_age(pair)
            if rng.random() < 0.1:
                gone = f"r{rng.randrange(number + 1)}"
                cancelled.add(gone)
                pair.cancel(gone)
        pair.stalled.clear()
        for _ in range(200):
            for _ in range(100):
                pair.turn()
            if all(rank.is_at_rest() for rank in pair.ranks):
                break
            let_tickets_age(pair)
        else:
            raise AssertionError("somebody still waits")
        # Of a cancelled one, either end may see first that the other gave up. No other request fails.
        assert {request for request, failures in pair.failed.items() if failures} <= cancelled
        pair.check()


def _to(rank: Rank, other: Rank, message: w.PeerMessage) -> None:
    rank.deliver(e.HostToRank(peer=e.FromPeer(worker=other.name, incarnation=other.incarnation, message=message)))
