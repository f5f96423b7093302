"""Transfers that the other end forgot are found; those that it works on are not, however slow it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import Incarnation, TransferId, WorkerId
from tandem.core.lease_timing import BEAT_S, LEASE_S
from tandem.kvtransfer.leases import SAY_EVERY_S, TransferLeases
from tandem.kvtransfer.transports.tcp_socket import LOST_AFTER_S

P, Q = WorkerId("p0"), WorkerId("p1")
ONE, TWO = Incarnation(1), Incarnation(2)
A, B, C = TransferId(10), TransferId(11), TransferId(12)


def opened() -> TransferLeases:
    leases = TransferLeases()
    leases.open(A, P, ONE)
    leases.open(B, P, ONE)
    leases.open(C, Q, ONE)
    return leases


def test_every_peer_is_told_once_a_second_what_is_open_with_it() -> None:
    leases = opened()
    assert leases.say(5.0) == {(P, ONE): [A, B], (Q, ONE): [C]}
    assert leases.say(5.0 + SAY_EVERY_S / 2) == {}
    leases.close(A)
    assert leases.say(5.0 + SAY_EVERY_S) == {(P, ONE): [B], (Q, ONE): [C]}
    leases.close(C)
    leases.close(C)
    assert leases.say(5.0 + 2 * SAY_EVERY_S) == {(P, ONE): [B]}
    assert leases.open_with(P, ONE) == [B]
    assert len(leases) == 1
    assert leases.open_with(P, TWO) == []


def test_left_out_for_a_lease_is_overdue_and_named_again_is_not() -> None:
    leases = opened()
    leases.hear(P, ONE, [A, B], 0.0)
    leases.hear(P, ONE, [A], 1.0)
    leases.hear(P, ONE, [A], 1.0 + LEASE_S - 0.01)
    assert leases.overdue() == []
    leases.hear(P, ONE, [A, B], 1.0 + LEASE_S)
    leases.hear(P, ONE, [B], 4.0)
    leases.hear(P, ONE, [B], 4.0 + LEASE_S)
    assert leases.overdue() == [A]
    leases.close(A)
    assert leases.overdue() == []


def test_silence_is_not_forgetting() -> None:
    """A word that crossed the ticket, then a long step: the peer names it as soon as it speaks again."""
    leases = opened()
    leases.hear(P, ONE, [A], 0.0)
    leases.hear(P, ONE, [A, B], 60.0)
    leases.hear(P, ONE, [A], 61.0)
    assert leases.overdue() == []


def test_another_peer_or_incarnation_says_nothing_about_it() -> None:
    leases = opened()
    leases.hear(P, TWO, [], 0.0)
    leases.hear(Q, ONE, [C], 0.0)
    leases.hear(P, TWO, [], 100.0)
    assert leases.overdue() == []


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.booleans()), max_size=40))
def test_overdue_is_what_was_left_out_ever_since_a_lease_ago(words: list[tuple[float, bool]]) -> None:
    """Against the whole history: two words without it, a lease apart, and none with it between them."""
    leases = TransferLeases()
    leases.open(A, P, ONE)
    now, history = 0.0, []
    for pause, is_named in words:
        now += pause
        leases.hear(P, ONE, [A] if is_named else [B], now)
        history.append((now, is_named))
        omitted = []
        for at, named in reversed(history):
            if named:
                break
            omitted.append(at)
        assert leases.overdue() == ([A] if omitted and now - min(omitted) >= LEASE_S else [])


def test_a_connection_is_lost_before_its_peer_is() -> None:
    """Else a transfer would be given up for silence on the control channel while its connection still counts."""
    assert SAY_EVERY_S + BEAT_S < LEASE_S
    assert LOST_AFTER_S + BEAT_S <= LEASE_S
