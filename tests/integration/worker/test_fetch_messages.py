"""Workers' messages about a fetch may be lost, late, repeated or wrong: its request is answered."""

from typing import Any

import pytest

from tandem.core import metric_names as names
from tandem.kvtransfer.wire import profile_to_wire
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.prefix_client import CEILING_S
from tests.integration.worker.fetchcase import HELD, PROMPT, ends_well, fetch, lease_passes, reasons
from tests.integration.worker.loopback import Rank
from tests.integration.worker.trio import Trio, losing

KINDS = ["fetch_request", "fetch_offer", "ticket"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_lost(trio: Trio, kind: str) -> None:
    trio.fate = losing(kind)
    fetch(trio)
    trio.run_until(lambda: trio.has_said("d0" if kind == "fetch_offer" else "d1", kind))
    trio.clock.skip(CEILING_S)
    ends_well(trio)
    assert reasons(trio) == {"late"}


def test_both_ends_forget_each_other(trio: Trio) -> None:
    """Ticket and give-up are lost: the holder's pins go when the requester does not name the fetch for a lease."""
    trio.fate = losing("ticket", "failed")
    fetch(trio)
    trio.run_until(lambda: trio.has_said("d1", "ticket"))
    trio.cancel("r")
    trio.turn(5)
    assert trio["d0"].context.engine.ledgers[0].counts().pushing == HELD // 16
    lease_passes(trio)
    assert trio.count("d0", "transfers_forgotten") == 1
    trio.rest_at_baseline()


def test_a_requester_that_is_forgotten_computes(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder gave up, and its word was lost."""
    monkeypatch.setattr("tandem.workercore.prefix_client.FLOOR_S", 1000.0)
    monkeypatch.setattr("tandem.workercore.prefix_client.CEILING_S", 1000.0)
    trio.fate = losing("ticket")
    fetch(trio)
    trio.run_until(lambda: trio.has_said("d1", "ticket"))
    gone = e.PeerGone(worker="d1", incarnation=trio["d1"].incarnation, reason="a channel broke")
    trio["d0"].deliver(e.HostToRank(peer_gone=gone))
    lease_passes(trio)
    ends_well(trio)
    assert reasons(trio) == {"forgotten"}


def test_every_message_twice(trio: Trio) -> None:
    trio.fate = lambda rank, message: 2
    fetch(trio)
    ends_well(trio)
    assert trio.count("d1", names.FETCHES) == 1
    assert trio.count("d1", "prefill_tokens") == len(PROMPT) - HELD


@pytest.mark.parametrize("kind", [*KINDS, "failed"])
def test_a_message_comes_after_the_end(trio: Trio, kind: str) -> None:
    """It is held back until its fetch is over at the other end, and comes then: twice."""
    kept: list[tuple[Rank, w.PeerMessage]] = []
    tickets: list[tuple[Rank, w.PeerMessage]] = []

    def hold_back(rank: Rank, message: w.PeerMessage) -> int:
        if message.WhichOneof("kind") == kind:
            kept.append((rank, message))
            return 0
        if kind == "failed" and message.WhichOneof("kind") == "ticket":
            tickets.append((rank, message))  # else all might be there before it is cancelled
            return 0
        return 1

    trio.fate = hold_back
    fetch(trio)
    if kind == "failed":
        trio.run_until(lambda: bool(tickets))
        trio.cancel("r")
    trio.run_until(lambda: bool(kept))
    for rank, message in tickets:
        trio.deliver(rank, trio["d0"], message)
    trio.clock.skip(CEILING_S)
    trio.turn(5)
    lease_passes(trio)
    trio.run_until_rest()
    trio.fate = losing()
    for rank, message in [*kept, *kept]:
        trio.deliver(rank, trio["d1" if rank.name == "d0" else "d0"], message)
    trio.rest_at_baseline()
    if kind != "failed":
        trio.check("r", PROMPT)


def test_late_words_about_a_fetch_do_not_touch_the_hand_over(trio: Trio) -> None:
    """p0 fetches from d0 and hands over to d0: "failed" of the former is not "failed" of the latter."""
    trio.fate = lambda rank, message: 2 if message.WhichOneof("kind") in ("failed", *KINDS) else 1
    trio["d0"].context.engine.ledgers[0].evict_cached()
    trio.serve("before2", PROMPT[:100], "d0")
    trio.submit("r", PROMPT, "p0", "d0", sources=[("d0", 96)])
    trio.run_until(lambda: trio.has_said("p0", "ticket"))
    ticket = next(said.ticket for who, what, said in trio.said if (who, what) == ("p0", "ticket"))
    failed = w.TransferFailed(request=ticket.request, attempt=1, transfer=ticket.transfer, code="cancelled")
    for name in ("p0", "d0"):
        other = trio["d0" if name == "p0" else "p0"]
        trio.deliver(other, trio[name], w.PeerMessage(failed=failed))
    ends_well(trio)


@pytest.mark.parametrize("fault", ["profile", "groups", "more", "layout", "codec", "incarnation", "endpoints"])
def test_tickets_that_were_not_agreed(trio: Trio, fault: str) -> None:
    def spoil(rank: Rank, message: w.PeerMessage) -> int:
        if not message.HasField("ticket"):
            return 1
        ticket = message.ticket
        if fault == "profile":
            ticket.profile.Clear()
        elif fault == "groups":
            ticket.groups[0].group = 7
        elif fault == "more":
            ticket.groups[0].blocks.extend(range(100))
        elif fault == "layout":
            ticket.profile.groups[0].block_tokens = 7
        elif fault == "codec":
            ticket.codec = "int8"
        elif fault == "incarnation":
            ticket.receiver_incarnation += 1
        else:
            del ticket.endpoints[:]
        return 1

    trio.fate = spoil
    fetch(trio)
    ends_well(trio)
    assert reasons(trio) == {"holder"}


@pytest.mark.parametrize("fault", ["profile", "model", "nothing", "stranger", "less"])
def test_offers_that_cannot_be_used(trio: Trio, fault: str) -> None:
    def spoil(rank: Rank, message: w.PeerMessage) -> int:
        if not message.HasField("fetch_offer"):
            return 1
        offer = message.fetch_offer
        if fault == "profile":
            offer.profile.Clear()
        elif fault == "model":
            offer.profile.fingerprint = "another"
        elif fault == "nothing":
            offer.tokens = 0
        elif fault == "less":
            offer.tokens = 15
        else:
            trio.deliver(trio["d2"], trio["d1"], message)
            return 0
        return 1

    trio.fate = spoil
    fetch(trio)
    trio.run_until(lambda: trio.has_said("d0", "fetch_offer"))
    trio.clock.skip(1.0 if fault != "stranger" else CEILING_S)
    lease_passes(trio)
    ends_well(trio)
    assert trio.count("d1", names.FETCHES) == 0


def test_questions_that_make_no_sense(trio: Trio) -> None:
    d0, d1 = trio["d0"], trio["d1"]
    profile = profile_to_wire(d1.context.profile)
    zero = profile_to_wire(d1.context.profile)
    zero.groups[0].block_tokens = 0
    common: dict[str, Any] = {
        "request": "x", "attempt": 1, "holder_incarnation": d0.incarnation, "requester_incarnation": d1.incarnation
    }  # fmt: skip
    questions = [
        w.FetchRequest(fetch=1, tokens=PROMPT, **common),
        w.FetchRequest(fetch=2, profile=profile, **common),
        w.FetchRequest(fetch=3, profile=zero, tokens=PROMPT, **common),
        w.FetchRequest(fetch=4, profile=profile, tokens=PROMPT, have_tokens=HELD, **common),
        w.FetchRequest(fetch=5, profile=profile, tokens=PROMPT, salt=b"another tenant", **common),
        w.FetchRequest(fetch=6, profile=profile, tokens=PROMPT, lossy="int8", **common),
        w.FetchRequest(fetch=7, profile=profile, tokens=PROMPT, **{**common, "holder_incarnation": 3}),
    ]
    for question in questions:
        trio.deliver(d1, d0, w.PeerMessage(fetch_request=question))
    trio.rest_at_baseline()
    offers = [said.fetch_offer for who, what, said in trio.said if what == "fetch_offer"]
    assert [offer.fetch for offer in offers] == [1, 2, 3, 4, 5, 6, 7]
    assert [offer.tokens for offer in offers] == [0] * 7
    assert all(offer.code and offer.message for offer in offers)
