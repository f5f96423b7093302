"""Blocks are counted in every pause that has lasted a second, once, and never between two requests."""

from __future__ import annotations

import pytest

from tests.unit.simulation.crowd import Crowd


def test_blocks_are_checked_once_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(blocks=16)
    worker, checks = crowd.worker, list[float]()
    monkeypatch.setattr(worker.engine, "check_integrity", lambda: checks.append(crowd.clock.now_s()))

    def pause(seconds: float) -> int:
        checks.clear()
        for _ in range(round(10 * seconds)):
            crowd.clock.advance(0.1)
            worker.turn()
        return len(checks)

    assert pause(3.0) == 1
    for _ in range(3):  # a request comes and goes
        wish = crowd.wish("p0", 8, is_asked=False)
        crowd.cancel(wish)
        assert pause(0.8) == 0
    assert pause(3.0) == 1
    crowd.close()
