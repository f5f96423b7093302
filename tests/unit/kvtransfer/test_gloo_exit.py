"""Gloo's objects are freed where the exit of the process waits for it, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.kvtransfer.transports import communicator
from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.communicator import _Calls, _GlooTransfer


class Work:
    """Notes at its end whether the exit would have waited."""

    def __init__(self, calls: _Calls, ends: list[bool]) -> None:
        self._calls, self._ends = calls, ends

    def wait(self, timeout: Any) -> None: ...

    def __del__(self) -> None:
        self._ends.append(self._calls._count > 0)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    left: list[Any] = []
    monkeypatch.setattr(communicator, "_LEFT", left)
    return left


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_while_the_process_runs_it_is_freed_inside_a_call(left: list[Any], is_waited_for: bool) -> None:
    calls, ends = _Calls(), list[bool]()
    transfer = _GlooTransfer(Work(calls, ends), calls)
    if is_waited_for:
        transfer.wait()
    del transfer
    assert (ends, left) == ([True], [])


def test_while_the_process_ends_it_stays(left: list[Any]) -> None:
    calls, ends = _Calls(), list[bool]()
    transfer = _GlooTransfer(Work(calls, ends), calls)
    calls.refuse()
    with pytest.raises(LinkClosedError, match="the process ends"):
        transfer.wait()
    del transfer
    assert (ends, len(left)) == ([], 1)
