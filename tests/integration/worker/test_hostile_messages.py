"""A message of a router or a peer fails its own request at worst: no rank ends, nothing else is touched."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.core.ids import WorkerId
from tandem.core.ledger import Holder, HoldKind
from tandem.kvtransfer.events import SendCompleted, SendFailed
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Loopback, Rank, forward, prompt_of

GREEDY: dict[str, Any] = {"max_tokens": 8, "n": 1, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}


def submission(request: str, leg: Any, **other: Any) -> w.Submit:
    sampling = g.SamplingParams(**GREEDY | other.pop("sampling", {}))
    values = {"attempt": 1, "prompt": prompt_of(40), "timeout_s": 60, **other}
    return w.Submit(request=request, leg=leg, sampling=sampling, **values)


def from_peer(rank: Rank, other: Rank, **kind: Any) -> None:
    message = e.FromPeer(worker=other.name, incarnation=other.incarnation, message=w.PeerMessage(**kind))
    rank.deliver(e.HostToRank(peer=message))


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": [1, 2, 3], "last_block_hash": b"0123456789abcdef"},
        {"forced": [g.ChoiceState(choice=0, tokens=[5], finish=99)]},  # type: ignore[arg-type]
        {"sampling": {"top_p": 0.0}},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"logit_bias": {4_000_000: 1.0}}},
        {"sampling": {"n": 0}},
        {"sampling": {"max_tokens": 0}},
        {"prompt": []},
        {"prompt": [4_000_000_000]},
        {"leg": 77},
    ],
    ids=str,
)
def test_a_bad_submission_is_refused(loopback: Loopback, bad: dict[str, Any]) -> None:
    for rank, leg in ((loopback.p, w.LEG_PREFILL), (loopback.d, w.LEG_DECODE), (loopback.d, w.LEG_FULL)):
        rank.from_router(submit=submission("bad", bad.get("leg", leg), **{k: v for k, v in bad.items() if k != "leg"}))
        for _ in range(3):
            loopback.turn()
    if "last_block_hash" not in bad:  # that one is counted, not refused
        assert {failure.code for failure in loopback.failed["bad"]} == {"invalid_request"}
    loopback.cancel("bad")
    loopback.submit("good", prompt_of(40), ignore_eos=True)
    loopback.run_until_rest(2000)
    assert len(loopback.tokens("good")) == 8
    loopback.rest_at_baseline()


@pytest.mark.parametrize("turns", [1, 3, 8, 60])
def test_a_repeated_submission_changes_nothing(loopback: Loopback, turns: int) -> None:
    loopback.submit("r", prompt_of(200), max_tokens=20, ignore_eos=True)
    for _ in range(turns):
        loopback.turn()
    loopback.submit("r", prompt_of(200), max_tokens=20, ignore_eos=True)
    for _ in range(3):
        loopback.turn()
    loopback.rest_at_baseline()
    assert len(loopback.tokens("r")) == 20
    assert not loopback.failed["r"]


def test_a_ticket_that_nobody_asked_for(loopback: Loopback) -> None:
    """It comes before the request left the queue: the promise is not used, and the request goes its way."""
    groups = [w.TicketGroup(group=0, skip=0, blocks=[0, 1, 2])]
    ticket = w.Ticket(
        request="r", attempt=1, transfer=5, sender_incarnation=loopback.p.incarnation,
        receiver_incarnation=loopback.d.incarnation, groups=groups,
        endpoints=[w.RankEndpoint(rank=0, transport="shm", host="h", address="/nowhere")],
    )  # fmt: skip
    loopback.submit("r", prompt_of(40), ignore_eos=True)
    from_peer(loopback.p, loopback.d, ticket=ticket)
    loopback.rest_at_baseline()
    assert len(loopback.tokens("r")) == 8


def test_a_ticket_asked_for_twice(loopback: Loopback) -> None:
    loopback.submit("r", prompt_of(40), max_tokens=60, ignore_eos=True)
    asked: list[w.TicketRequest] = []
    forward(
        loopback,
        loopback.p,
        "ticket_request",
        lambda message: asked.append(w.TicketRequest.FromString(message.SerializeToString())),
    )
    from_peer(loopback.d, loopback.p, ticket_request=asked[0])
    loopback.rest_at_baseline()
    assert len(loopback.tokens("r")) == 60
    assert not loopback.failed["r"]
    assert loopback.d.context.counters.get("tickets_refused", 0) <= 1


@pytest.mark.parametrize(
    "change",
    [
        lambda complete: complete.choices[0].MergeFrom(g.ChoiceState(finish=99)),  # type: ignore[arg-type]
        lambda complete: complete.choices[0].MergeFrom(g.ChoiceState(finish=g.FINISH_REASON_STOP)),
        lambda complete: complete.choices[0].ClearField("tokens"),
        lambda complete: complete.choices[0].tokens.append(4_000_000_000),
        lambda complete: complete.ClearField("choices"),
        lambda complete: complete.choices.add(choice=15, tokens=[3]),
        lambda complete: complete.choices.add(choice=0, tokens=[3]),
    ],
    ids=["unknown finish", "all finished", "no token", "no such token", "no choice", "too many", "twice"],
)
def test_a_bad_hand_over_fails_its_request(loopback: Loopback, change: Callable[[w.Complete], None]) -> None:
    loopback.submit("r", prompt_of(40), ignore_eos=True)
    forward(loopback, loopback.p, "complete", change)
    loopback.rest_at_baseline()
    assert loopback.failed["r"]
    loopback.submit("good", prompt_of(40), ignore_eos=True)
    loopback.run_until_rest(2000)
    assert len(loopback.tokens("good")) == 8


def test_a_failure_of_another_transfer_is_not_ours(loopback: Loopback) -> None:
    loopback.submit("r", prompt_of(300), max_tokens=20, ignore_eos=True)
    forward(loopback, loopback.d, "ticket", lambda _: None)
    late = w.TransferFailed(request="r", attempt=1, transfer=12345, code="cancelled", message="of an older ticket")
    from_peer(loopback.d, loopback.p, failed=late)
    loopback.rest_at_baseline()
    assert len(loopback.tokens("r")) == 20


def test_a_verdict_of_another_worker_is_not_ours(loopback: Loopback) -> None:
    """Only the worker that received the blocks can report that it verified them."""
    loopback.submit("r", prompt_of(200), max_tokens=4, ignore_eos=True)
    while not loopback.p.role._by_transfer:  # type: ignore[attr-defined]
        loopback.turn()
    ((transfer, handover),) = loopback.p.role._by_transfer.items()  # type: ignore[attr-defined]
    verified = w.PeerMessage(verified=w.Verified(request="r", attempt=1, transfer=transfer))
    loopback.p.role.peer_message(WorkerId("x9"), verified, 0.0)
    assert not handover.is_verified
    loopback.rest_at_baseline()
    assert len(loopback.tokens("r")) == 4


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_push_that_ended_just_before_its_cancel(loopback: Loopback, is_sent: bool) -> None:
    """The sender's event is on its way when the request is cancelled: no further event comes, the blocks go back."""
    p = loopback.p
    loopback.submit("r", prompt_of(300), max_tokens=50, ignore_eos=True)
    forward(loopback, loopback.d, "ticket", lambda _: None)
    p.loop.turn(max_wait_s=0.002)
    (transfer,) = p.sender._transfers
    opened = p.sender._transfers[transfer]
    ended = SendCompleted(transfer=transfer, bytes=1) if is_sent else SendFailed(transfer=transfer, reason="a test")
    opened.outgoing.fail("a test")
    del p.sender._transfers[transfer]
    loopback.cancel("r")
    for item in p.inbox.take(0.1):
        p.loop._deferred.append(item)  # the cancel is taken first …
    p.loop._deferred.append(ended)  # … and then the event
    loopback.rest_at_baseline()


def test_a_link_lost_after_the_verdict_fails_nothing(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver reported that it verified everything; then the link ends before its last reply came through."""
    role = loopback.p.role
    tell = role.transfer_event
    sent: list[SendCompleted] = []

    def hold(event: object) -> None:
        sent.extend([event] if isinstance(event, SendCompleted) else [])

    monkeypatch.setattr(role, "transfer_event", hold)
    loopback.submit("r", prompt_of(40), max_tokens=8, ignore_eos=True)
    for _ in range(100):
        loopback.turn()
        if sent and loopback.d.is_at_rest():
            break
    tell(SendFailed(transfer=sent[0].transfer, reason="the link ended"))
    loopback.rest_at_baseline()
    assert not loopback.failed["r"]
    assert len(loopback.tokens("r")) == 8


@pytest.mark.parametrize("leg", [w.LEG_FULL, w.LEG_PREFILL])
def test_a_replay_with_a_finished_choice(loopback: Loopback, leg: Any) -> None:
    """Only the choices that go on are waited for; an answer that had ended is sent again, in full, once."""
    forced = [
        g.ChoiceState(choice=0, tokens=[5, 6], finish=g.FINISH_REASON_STOP),
        g.ChoiceState(choice=1, tokens=[7, 8, 9, 10]),
    ]
    settings: dict[str, Any] = {"n": 3, "max_tokens": 4, "ignore_eos": True}
    if leg == w.LEG_PREFILL:
        loopback.submit("r", prompt_of(40), forced=forced, **settings)
    else:
        loopback.d.from_router(submit=submission("r", leg, forced=forced, sampling=settings))
    loopback.rest_at_baseline()
    assert not loopback.failed["r"]
    assert loopback.chunks["r"][0] == []
    assert {(c.index, tuple(c.tokens), c.finish) for c in loopback.chunks["r"][1]} == {
        (3, (10,), g.FINISH_REASON_LENGTH)
    }
    assert len(loopback.tokens("r", 2)) == 4


def test_a_replay_that_had_ended_needs_no_decode_worker(loopback: Loopback) -> None:
    forced = [g.ChoiceState(choice=0, tokens=[7, 8, 9, 10])]
    loopback.submit("r", prompt_of(40), forced=forced, max_tokens=4, ignore_eos=True)
    loopback.rest_at_baseline()
    assert [tuple(c.tokens) for c in loopback.chunks["r"][0]] == [(10,)]


def test_a_decode_worker_that_gives_up_answers_who_asked(loopback: Loopback) -> None:
    """Its router left while the ticket waited for room: the prefill worker must not wait for ever."""
    d = loopback.d
    (ledger,) = d.context.engine.ledgers
    other = Holder(HoldKind.RESERVED, "a test")
    ledger.allocate(other, ledger.num_blocks)
    loopback.submit("r", prompt_of(40), max_tokens=8, ignore_eos=True)
    for _ in range(30):
        loopback.turn()
    assert not loopback.p.is_at_rest()
    d.deliver(e.HostToRank(router_gone=e.RouterGone(router="test")))
    loopback.run_until_rest(500)
    ledger.release(other)
    loopback.rest_at_baseline()
