"""Test states of transfers and the leases that find forgotten ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, TransferId, WorkerId
from tandem.core.lease_timing import BEAT_S, LEASE_S
from tandem.kvtransfer.leases import SAY_EVERY_S, TransferLeases
from tandem.kvtransfer.state import NEXT, IllegalTransitionError, TransferPhase, TransferState
from tandem.kvtransfer.transports.tcp_socket import LOST_AFTER_S

P = TransferPhase
DRAWN = {
    (P.RESERVED, P.PUSHING),
    (P.PUSHING, P.COMPLETE),
    (P.COMPLETE, P.VERIFIED),
    (P.VERIFIED, P.ADMITTED),
    *((p, end) for p in (P.RESERVED, P.PUSHING, P.COMPLETE, P.VERIFIED) for end in (P.FAILED, P.CANCELLED)),
    (P.FAILED, P.FENCED),
    (P.CANCELLED, P.FENCED),
    (P.FENCED, P.RELEASED),
}


def test_the_table_is_the_diagram() -> None:
    assert {(a, b) for a, following in NEXT.items() for b in following} == DRAWN


@given(st.lists(st.tuples(st.sampled_from(P), st.floats(0, 10)), max_size=60))
def test_any_walk_obeys_the_diagram_and_ends_once(steps: list[tuple[TransferPhase, float]]) -> None:
    clock = ManualClock()
    state = TransferState(clock)
    terminals = []
    for phase, wait_s in steps:
        before, entered = state.phase, dict(state.entered_s)
        clock.advance(wait_s)
        if (before, phase) in DRAWN:
            state.to(phase)
            assert state.phase is phase
            assert state.entered_s[phase] == clock.now_s()
            terminals += [phase] if state.is_terminal else []
        else:
            with pytest.raises(IllegalTransitionError):
                state.to(phase)
            assert state.phase is before
            assert state.entered_s == entered
        assert state.age_s() == clock.now_s() - state.entered_s[P.RESERVED]
        assert state.can_move_bytes == (state.phase in (P.RESERVED, P.PUSHING))
        assert state.can_be_given_up == (state.phase in (P.RESERVED, P.PUSHING, P.COMPLETE, P.VERIFIED))
    assert len(terminals) <= 1
    assert all(t in (P.ADMITTED, P.RELEASED) for t in terminals)


def test_a_reason_is_kept_and_no_byte_moves_after_it() -> None:
    state = TransferState(ManualClock())
    state.fail("link lost")
    assert (state.phase, state.reason, state.can_move_bytes) == (P.FAILED, "link lost", False)
    with pytest.raises(IllegalTransitionError):
        state.cancel("too late")
    state.to(P.FENCED)
    state.to(P.RELEASED)
    assert state.is_terminal


P0, P1 = WorkerId("p0"), WorkerId("p1")
ONE, TWO = Incarnation(1), Incarnation(2)
A, B, C = TransferId(10), TransferId(11), TransferId(12)


def opened() -> TransferLeases:
    leases = TransferLeases()
    leases.open(A, P0, ONE)
    leases.open(B, P0, ONE)
    leases.open(C, P1, ONE)
    return leases


def test_every_peer_is_told_once_a_second_what_is_open_with_it() -> None:
    leases = opened()
    assert leases.say(5.0) == {(P0, ONE): [A, B], (P1, ONE): [C]}
    assert leases.say(5.0 + SAY_EVERY_S / 2) == {}
    leases.close(A)
    assert leases.say(5.0 + SAY_EVERY_S) == {(P0, ONE): [B], (P1, ONE): [C]}
    leases.close(C)
    leases.close(C)
    assert leases.say(5.0 + 2 * SAY_EVERY_S) == {(P0, ONE): [B]}
    assert leases.open_with(P0, ONE) == [B]
    assert len(leases) == 1
    assert leases.open_with(P0, TWO) == []


def test_left_out_for_a_lease_is_overdue_and_named_again_is_not() -> None:
    leases = opened()
    leases.hear(P0, ONE, [A, B], 0.0)
    leases.hear(P0, ONE, [A], 1.0)
    leases.hear(P0, ONE, [A], 1.0 + LEASE_S - 0.01)
    assert leases.overdue() == []
    leases.hear(P0, ONE, [A, B], 1.0 + LEASE_S)
    leases.hear(P0, ONE, [B], 4.0)
    leases.hear(P0, ONE, [B], 4.0 + LEASE_S)
    assert leases.overdue() == [A]
    leases.close(A)
    assert leases.overdue() == []


def test_silence_is_not_forgetting() -> None:
    """A word that crossed the ticket, then a long step: the peer names it as soon as it speaks again."""
    leases = opened()
    leases.hear(P0, ONE, [A], 0.0)
    leases.hear(P0, ONE, [A, B], 60.0)
    leases.hear(P0, ONE, [A], 61.0)
    assert leases.overdue() == []


def test_another_peer_or_incarnation_says_nothing_about_it() -> None:
    leases = opened()
    leases.hear(P0, TWO, [], 0.0)
    leases.hear(P1, ONE, [C], 0.0)
    leases.hear(P0, TWO, [], 100.0)
    assert leases.overdue() == []


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.booleans()), max_size=40))
def test_overdue_is_what_was_left_out_ever_since_a_lease_ago(words: list[tuple[float, bool]]) -> None:
    """Against the whole history: two words without it, a lease apart, and none with it between them."""
    leases = TransferLeases()
    leases.open(A, P0, ONE)
    now, history = 0.0, []
    for pause, is_named in words:
        now += pause
        leases.hear(P0, ONE, [A] if is_named else [B], now)
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
