"""A worker with a device that is broken for good ends, in place of failing every request that comes."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.errors import WorkerLostError
from tests.unit.simulation.crowd import Crowd


def test_a_step_that_fails_without_any_fault_of_its_requests_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(blocks=16, max_tokens=8)
    wish = crowd.wish("p0", 8)
    crowd.push(wish, 100)

    def broken(*args: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(crowd.worker.runner, "step", broken)
    with pytest.raises(WorkerLostError, match="illegal memory access"):
        crowd.complete(wish)
    crowd.close()
