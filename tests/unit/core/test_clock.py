"""The clock by which leases end."""

from __future__ import annotations

import time

import pytest

from tandem.core.clock import MonotonicClock


def test_it_goes_on_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_MONOTONIC: 60.0, time.CLOCK_BOOTTIME: 3660.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert MonotonicClock().now_s() == 3660.0
