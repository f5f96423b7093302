"""Many prefill workers, one small decode worker: shares, turns, revoked tickets, forgotten transfers, no deadlock."""

import random
from contextlib import closing
from pathlib import Path

import pytest

from tandem.core.lease_timing import LEASE_S
from tandem.core.ledger import Holder, HoldKind
from tandem.decode_worker import ticket_grants
from tandem.kvtransfer.leases import SAY_EVERY_S
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Rank
from tests.integration.worker.trio import Crowd, losing


def prompt_of(tokens: int, seed: int) -> list[int]:
    return [(seed * 977 + 7 * i * i + 31 * i) % 4000 + 10 for i in range(tokens)]


def reserved(pair: Crowd) -> dict[str, list[int]]:
    """Blocks of every unadmitted reservation at D, by peer."""
    found: dict[str, list[int]] = {}
    for reservation in pair.d.role._reservations.all():  # type: ignore[attr-defined]
        found.setdefault(reservation.peer, []).append(len(reservation.blocks.tables[0]))
    return found


def let_tickets_age(pair: Crowd) -> None:
    pair.clock.skip(ticket_grants.UNUSED_S + 0.1)


def test_one_peer_gets_a_quarter_while_others_wait(folder: Path) -> None:
    """Eight prompts of one peer asked first, when D was full; the other peer's two do not wait for all of them."""
    with closing(Crowd(folder, 2, d_blocks=32)) as pair:
        pair.fate = losing("complete")  # nothing is ever admitted
        ledger = pair.d.context.engine.ledgers[0]
        others = Holder(HoldKind.REQUEST, "others")
        assert ledger.allocate(others, 31) is not None
        for number in range(8):
            pair.ask(f"many{number}", 0, prompt_of(48, 10 + number))
        pair.run_until(lambda: pair.d.context.counters.get("tickets_queued") == 8)
        pair.ask("large", 1, prompt_of(144, 2))  # asks before the shorter one comes, which P would take first
        pair.run_until(lambda: pair.d.context.counters.get("tickets_queued") == 9)
        pair.ask("small", 1, prompt_of(48, 3))
        pair.run_until(lambda: pair.d.context.counters.get("tickets_queued") == 10)
        assert reserved(pair) == {}
        ledger.release(others)
        pair.turn(50)
        assert reserved(pair) == {"p0": [3, 3], "p1": [9]}, "a quarter is 8 blocks; one request may have more"
        pair.cancel("large")
        pair.run_until(lambda: reserved(pair).get("p1") == [3])
        pair.run_until(lambda: reserved(pair) == {"p0": [3] * 8, "p1": [3]}, 2000)  # no other request waits any more
        for request in pair.asked:
            pair.cancel(request)
        pair.rest_at_baseline()


def test_a_peer_alone_may_fill_the_pool(folder: Path) -> None:
    with closing(Crowd(folder, 2, d_blocks=32)) as pair:
        pair.fate = losing("complete")
        for number in range(8):
            pair.ask(f"many{number}", 0, prompt_of(48, number))
        pair.run_until(lambda: sum(reserved(pair).get("p0", [])) == 24, 2000)
        for request in pair.asked:
            pair.cancel(request)
        pair.run_until_rest()


def test_waiting_tickets_are_told_their_place(folder: Path) -> None:
    with closing(Crowd(folder, 1, d_blocks=12)) as pair:
        for number in range(4):
            pair.ask(f"r{number}", 0, prompt_of(140, number), max_tokens=20)
        pair.run_until_rest()
        pair.check_all()
        assert pair.d.context.counters["tickets_queued"] >= 3
        assert pair.ps[0].context.counters["tickets_queued"] == pair.d.context.counters["tickets_queued"]
        assert pair.d.role._tickets._wait_per_place_s > 0  # type: ignore[attr-defined]


def test_a_ticket_that_nobody_uses_is_taken_back_and_asked_for_again(folder: Path) -> None:
    """P0 is busy with something else after it asked. P1's request takes its place; P0 waits in turn and answers."""
    with closing(Crowd(folder, 2, d_blocks=10)) as pair:
        p0, p1 = pair.ps
        pair.ask("slow", 0, prompt_of(100, 1))
        pair.run_until(lambda: pair.has_said("p0", "ticket_request") == 1)
        pair.stalled.add("p0")
        pair.run_until(lambda: pair.has_said("d0", "ticket") == 1)
        pair.ask("quick", 1, prompt_of(100, 2))
        pair.run_until(lambda: pair.has_said("d0", "queued") == 1)
        pair.turn(20)
        assert pair.has_said("d0", "revoked") == 0, "not before its time"
        let_tickets_age(pair)
        pair.run_until(lambda: pair.d.context.counters.get("requests_admitted", 0) == 1)
        assert len(pair.got["quick"]) > 0
        assert pair.has_said("d0", "revoked") == 1
        pair.stalled.clear()
        pair.run_until_rest()
        pair.check_all()
        assert not pair.failed["slow"]
        assert not pair.failed["quick"]
        assert p0.context.counters["tickets_revoked"] == 1
        assert p1.context.counters.get("tickets_revoked", 0) == 0
        assert pair.has_said("p0", "ticket_request") == 2


def test_pushes_under_way_to_a_revoked_ticket_are_dropped(folder: Path) -> None:
    """The word of the revocation is late: P0 pushes all of it. Nothing lands; it pushes again under a new ticket."""
    with closing(Crowd(folder, 2, d_blocks=10)) as pair:
        p0 = pair.ps[0]
        pair.ask("slow", 0, prompt_of(100, 1))
        late: list[w.PeerMessage] = []

        def hold_back(rank: Rank, message: w.PeerMessage) -> int:
            if (message.HasField("ticket") and message.ticket.request == "slow") or message.HasField("revoked"):
                late.append(message)
                return 0
            return 1

        pair.fate = hold_back
        pair.run_until(lambda: len(late) == 1)
        pair.ask("quick", 1, prompt_of(100, 2))
        pair.run_until(lambda: pair.has_said("d0", "queued") == 1)
        let_tickets_age(pair)
        pair.run_until(lambda: len(late) == 2)
        pair.fate = losing()
        ticket, revoked = late
        pair.deliver(pair.d, p0, ticket)
        pair.run_until(lambda: pair.has_said("p0", "complete") == 1)
        pair.run_until(lambda: pair.d.context.receiver.counters()["dropped_fenced"] > 0)
        assert pair.ps[0].context.sender.transfers(), "a drop without a word does not end the transfer"
        pair.deliver(pair.d, p0, revoked)
        pair.deliver(pair.d, p0, revoked)  # and sent twice
        pair.deliver(pair.d, p0, ticket)
        pair.run_until_rest()
        pair.check_all()
        assert not pair.failed["slow"]
        assert pair.d.context.counters["completes_dropped"] == 1
        assert p0.context.counters["revocations_dropped"] == 1
        assert p0.context.counters["tickets_dropped"] == 1


def test_an_older_ticket_makes_the_youngest_running_request_wait(folder: Path) -> None:
    """The oldest request comes late to D, when younger ones run there: the youngest makes way, and all answer."""
    with closing(Crowd(folder, 3, d_blocks=14)) as pair:
        pair.ask("old", 0, prompt_of(90, 1), max_tokens=3)
        pair.stalled.add("p0")
        pair.turn(3)
        for number in (1, 2):
            pair.ask(f"young{number}", number, prompt_of(60, 1 + number), max_tokens=60)
        pair.run_until(lambda: pair.d.context.counters.get("requests_admitted", 0) == 2)
        pair.stalled.clear()
        pair.run_until(lambda: pair.d.context.counters.get("requests_admitted", 0) == 3)
        assert pair.d.context.counters["preempted_for_tickets"] == 1
        pair.run_until_rest()
        pair.check_all()
        assert not any(pair.failed.values())


def test_a_ticket_that_got_lost_does_not_hold_blocks_for_ever(folder: Path) -> None:
    """P never received the transfer and reports so: after a lease D gives the blocks back, with the reason."""
    with closing(Crowd(folder, 1, d_blocks=32)) as pair:
        pair.fate = losing("ticket")
        pair.ask("r", 0, prompt_of(100, 1))
        pair.run_until(lambda: bool(reserved(pair)))
        pair.run_until(lambda: pair.has_said("p0", "holding") > 0)
        pair.turn(5)
        pair.clock.skip(LEASE_S - 0.5)
        pair.turn(5)
        assert reserved(pair), "not before the lease is over"
        pair.clock.skip(SAY_EVERY_S)
        pair.run_until(lambda: not reserved(pair))
        assert pair.d.context.counters["transfers_forgotten"] == 1
        assert "no longer names" in pair.failed["r"][0].message
        pair.cancel("r")
        pair.rest_at_baseline()


def test_a_push_hold_whose_receiver_is_done_with_it_ends(folder: Path) -> None:
    """The word `verified` got lost: P's blocks come back a lease later, and the answer is not touched."""
    with closing(Crowd(folder, 1, d_blocks=32)) as pair:
        pair.fate = losing("verified")
        pair.ask("r", 0, prompt_of(100, 1), max_tokens=4)
        p = pair.ps[0]
        pair.run_until(lambda: len(pair.got["r"]) == 4)
        assert p.context.engine.ledgers[0].holders()
        pair.clock.skip(SAY_EVERY_S)
        pair.run_until(lambda: pair.has_said("d0", "holding") > 0)
        pair.turn(5)
        pair.clock.skip(LEASE_S)  # P names it, D answers that it has nothing
        pair.run_until(lambda: not p.context.engine.ledgers[0].holders())
        assert p.context.counters["transfers_forgotten"] == 1
        pair.run_until_rest()
        pair.failed.clear()  # P's leg failed; the answer had all come by then
        pair.check_all()


def test_slow_is_not_forgotten(folder: Path) -> None:
    """Both ends name a transfer that takes many leases: neither ends it."""
    with closing(Crowd(folder, 1, d_blocks=32)) as pair:
        kept: list[w.PeerMessage] = []

        def keep(rank: Rank, message: w.PeerMessage) -> int:
            if message.HasField("complete"):
                kept.append(message)
            return int(not message.HasField("complete"))

        pair.fate = keep
        pair.ask("r", 0, prompt_of(100, 1))
        pair.run_until(lambda: bool(kept))
        for _ in range(12):
            pair.clock.skip(SAY_EVERY_S)
            pair.turn(3)
        assert pair.has_said("d0", "holding") >= 12
        assert pair.has_said("p0", "holding") >= 12
        pair.fate = losing()
        pair.deliver(pair.ps[0], pair.d, kept[0])
        pair.run_until_rest()
        pair.check_all()
        assert not pair.failed["r"]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(8))
def test_everybody_is_served(folder: Path, seed: int) -> None:
    """P's full of computed prompts that wait for tickets, a D that holds little more than one of them, P's that stand
    still with tickets in hand: every request is answered, by the oracle's tokens, and all blocks come back."""
    rng, cancelled = random.Random(seed), set[str]()
    sizes = {"d_blocks": rng.choice([12, 14, 20]), "p_blocks": rng.choice([12, 24])}
    with closing(Crowd(folder, 4, **sizes, max_sequences=8)) as pair:
        for number in range(40):
            tokens = rng.choice([1, 16, 40, 90, 140])
            prompt = prompt_of(tokens, rng.randrange(6))
            pair.ask(f"r{number}", rng.randrange(4), prompt, max_tokens=rng.choice([2, 8, min(40, 158 - tokens)]))
            pair.turn(rng.randrange(4))
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
            pair.turn(100)
            if all(rank.is_at_rest() for rank in pair.ranks.values()):
                break
            let_tickets_age(pair)
        else:
            raise AssertionError("somebody still waits")
        # Of a cancelled one, either end may see first that the other gave up. No other request fails.
        assert {request for request, failures in pair.failed.items() if failures} <= cancelled
        pair.check_all()
