"""The state machine: only the drawn transitions, exactly one terminal state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.kvtransfer.state import NEXT, IllegalTransitionError, TransferPhase, TransferState

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
