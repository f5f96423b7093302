"""Holds of KV blocks that the workers' books explain together."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.core.ledger import Holder, HoldKind, subject_of
from tandem.router.admin.block_hold_audit import Auditor, Books, Claimed, Hold, HoldVerdict, Judged, Known, Moving

P, D = 11, 22
KEY, T = "r#1", 7


def hold(kind: str, key: str) -> Hold:
    subject = subject_of(Holder(HoldKind[kind.upper()], key))
    return Hold(
        group=0, kind=kind, key=key, subject=subject.key, request=subject.request, attempt=subject.attempt,
        transfer=subject.transfer, since_s=1.0, blocks=(1, 2),
    )  # fmt: skip


MOVING = Moving(
    transfer=T, request="r", attempt=1, sender="p0", sender_incarnation=P, receiver="d0", receiver_incarnation=D,
    phase="pushing", age_s=0.1,
)  # fmt: skip
RESERVATION = Claimed(kind="reservation", key=KEY, transfer=T, peer="p0", peer_incarnation=P)
HANDOVER = Claimed(kind="handover", key=KEY, transfer=T, peer="d0", peer_incarnation=D)
KNOWN = Known(request="r", attempt=1, router="r1", is_in_engine=True)


def books(worker: str, incarnation: int, **changes: Any) -> Books:
    fields: dict[str, Any] = {
        "worker": worker, "incarnation": incarnation, "role": "", "now_s": 9.0, "totals": (), "holds": (),
        "requests": {}, "sending": {}, "receiving": {}, "claims": {},
    }  # fmt: skip
    return Books(**fields | changes)


def d(**changes: Any) -> Books:
    fields: dict[str, Any] = {
        "holds": (hold("reserved", "r#1/7"),), "receiving": {T: MOVING}, "claims": {T: RESERVATION},
    }  # fmt: skip
    return books("d0", D, **fields | changes)


def p(**changes: Any) -> Books:
    fields: dict[str, Any] = {"holds": (), "sending": {T: MOVING}, "claims": {T: HANDOVER}}
    return books("p0", P, **fields | changes)


def judge(*those: Books, unanswered: tuple[str, ...] = ()) -> list[Judged]:
    return Auditor(router="r1", flights={("r", 1)}, books=those, unanswered=unanswered).judge()


def test_keys_are_read() -> None:
    assert hold("request", "chat#cmpl#2#0").subject == "chat#cmpl#2"
    assert hold("request", "r#1#spare").subject == KEY
    assert (hold("pushing", "r#1/7").subject, hold("pushing", "r#1/7").transfer) == (KEY, T)
    odd = hold("reserved", "a/b")
    assert (odd.subject, odd.request, odd.attempt, odd.transfer) == ("a/b", "a/b", 0, 0)


@pytest.mark.parametrize(
    ("known", "why", "verdict"),
    [
        ({KEY: KNOWN}, "a request in flight", HoldVerdict.EXPLAINED),
        ({KEY: replace(KNOWN, router="r2")}, "a request of router r2", HoldVerdict.EXPLAINED),
        ({KEY: replace(KNOWN, is_in_engine=False)}, "not in the engine", HoldVerdict.SUSPECT),
        ({KEY: replace(KNOWN, attempt=2)}, "no longer has this attempt", HoldVerdict.SUSPECT),
        ({}, "knows no such request", HoldVerdict.SUSPECT),
    ],
)
def test_a_request_is_explained_by_worker_and_router(known: Any, why: str, verdict: HoldVerdict) -> None:
    (judged,) = judge(books("d0", D, holds=(hold("request", "r#1#0"),), requests=known))
    assert judged.verdict is verdict
    assert why in judged.why


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ({}, {}, "p0 pushes to it"),
        ({}, {"sending": {}}, "a hand-over of p0"),
        ({}, {"claims": {}}, "p0 pushes to it"),
        ({"claims": {}}, {}, "the role has no such reservation"),
        ({"claims": {T: replace(RESERVATION, key="r#2")}}, {}, "the role has no such reservation"),
        ({"receiving": {}}, {}, "not open in the receiver"),
        ({"receiving": {T: replace(MOVING, attempt=2)}}, {}, "not open in the receiver"),
        ({}, {"incarnation": 12}, "another incarnation"),
        ({}, {"sending": {}, "claims": {}}, "knows nothing of this transfer"),
        ({}, {"sending": {T: replace(MOVING, attempt=2)}, "claims": {}}, "knows nothing"),
        ({}, {"sending": {T: replace(MOVING, sender_incarnation=12)}, "claims": {}}, "knows nothing"),
        ({}, {"sending": {T: replace(MOVING, receiver_incarnation=23)}, "claims": {}}, "knows nothing"),
        ({}, {"sending": {}, "claims": {T: replace(HANDOVER, peer_incarnation=23)}}, "knows nothing"),
        ({}, {"sending": {}, "claims": {T: replace(HANDOVER, kind="quiescing")}}, "knows nothing"),
    ],
)
def test_a_reservation_needs_its_other_half(ours: Any, theirs: Any, why: str) -> None:
    (judged,) = judge(d(**ours), replace(p(), **theirs))
    assert why in judged.why
    is_explained = why in ("p0 pushes to it", "a hand-over of p0")
    assert judged.verdict is (HoldVerdict.EXPLAINED if is_explained else HoldVerdict.SUSPECT)


@pytest.mark.parametrize(
    ("ours", "theirs", "why", "is_explained"),
    [
        ({}, {}, "a transfer to d0", True),
        ({"claims": {}}, {}, "would not hear of its end", False),
        ({"sending": {}}, {}, "d0 has it reserved", True),
        ({"sending": {}, "claims": {}}, {}, "no such hand-over", False),
        ({"sending": {}}, {"claims": {}}, "knows nothing", False),
        ({"sending": {}}, {"incarnation": 23}, "another incarnation", False),
        ({"claims": {T: replace(HANDOVER, kind="quiescing", peer="", peer_incarnation=0)}}, {}, "a transfer to", True),
        ({"sending": {}, "claims": {T: replace(HANDOVER, kind="quiescing")}}, {}, "no such hand-over", False),
    ],
)
def test_a_push_hold_needs_an_open_transfer(ours: Any, theirs: Any, why: str, is_explained: bool) -> None:
    sender = replace(p(), holds=(hold("pushing", "r#1/7"),), **ours)
    judged = next(one for one in judge(sender, replace(d(), **theirs)) if one.hold.kind == "pushing")
    assert why in judged.why
    assert (judged.verdict is HoldVerdict.EXPLAINED) is is_explained


def test_who_did_not_answer_may_know() -> None:
    (judged,) = judge(d(), unanswered=("p0",))
    assert judged.verdict is HoldVerdict.UNKNOWN
    (judged,) = judge(d())
    assert judged.verdict is HoldVerdict.SUSPECT, "it is not in the cluster at all"


@pytest.mark.parametrize(
    ("changes", "is_fenced"),
    [
        ({"receiving": {}, "claims": {}}, True),
        ({"claims": {}}, False),
        ({"receiving": {}}, False),
        ({"receiving": {}, "claims": {}, "requests": {KEY: KNOWN}}, False),
        ({"receiving": {}, "claims": {8: replace(RESERVATION, transfer=8)}}, False),
        ({"receiving": {}, "claims": {}, "sending": {8: replace(MOVING, transfer=8)}}, False),
    ],
)
def test_fenced_is_what_nobody_there_works_on(changes: Any, is_fenced: bool) -> None:
    (judged,) = judge(d(**changes))
    assert judged.is_fenced is is_fenced
