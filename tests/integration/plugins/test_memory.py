"""Memory that a test leaves behind in cycles is given back before the next one begins."""

from __future__ import annotations

import gc
from typing import Any

from tests.plugins.memory import GROWTH_MIB, Memory, resident_mib


def leave_behind(mib: int) -> None:
    """A cycle that holds so much memory."""
    held: dict[str, Any] = {"data": b"\1" * (mib << 20)}
    held["itself"] = held


def test_growth_is_collected_and_a_little_is_not() -> None:
    gc.collect()
    gc.disable()
    try:
        plugin, before_mib = Memory(), resident_mib()
        leave_behind(GROWTH_MIB // 2)
        plugin.pytest_runtest_logfinish()
        assert resident_mib() > before_mib + GROWTH_MIB // 4, "little is not worth a look at all objects"
        leave_behind(GROWTH_MIB)
        plugin.pytest_runtest_logfinish()
        assert resident_mib() < before_mib + GROWTH_MIB // 4
    finally:
        gc.enable()
