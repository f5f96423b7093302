"""Workers that wait for a machine with room, from the cluster's events; and their line in `status`."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tandem.clusterctl.inspect import status
from tandem.clusterctl.unscheduled import Unplaced
from tandem.core.errors import UnavailableError

ROOM = "for a place: needs 2 CPU on one node: 10.0.0.2 has 1 of 2 CPU free"


def event(time_s: float, kind: str, reason: str = "", subject: str = "decode-1") -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, "subject": subject, "reason": reason}


WAITS = [event(1, "started"), event(2, "waiting", ROOM), event(3, "exited"), event(3, "restart_planned")]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], ""),
        (WAITS[:2], f"waits {ROOM}"),
        (WAITS, f"waits {ROOM}"),
        ([*WAITS, event(9, "waiting", "for a place: no node has joined")], "waits for a place: no node has joined"),
        ([*WAITS, event(9, "started", "it has a place on 10.0.0.3")], ""),
        ([*WAITS, event(9, "stopping")], ""),
        ([event(2, "waiting", "no room for 1 more ranks under max_ranks")], ""),
        ([event(2, "waiting", ROOM, "decode-2")], ""),
    ],
)
def test_what_a_worker_waits_for(events: list[dict[str, Any]], why: str) -> None:
    unplaced = Unplaced()
    unplaced.hear(events)
    assert unplaced.why("decode-1") == why
    if why:
        assert unplaced.since_s("decode-1") == 2


class Admin:
    """Decode-1 is wanted and not there."""

    def __init__(self, events: list[dict[str, Any]] | None) -> None:
        self._events = events

    def status(self) -> dict[str, Any]:
        up = {"worker": "decode-0", "is_connected": True, "is_registered": True, "model": "m", "role": "decode"}
        return {"is_ready": True, "workers": [up]}

    def metrics(self) -> str:
        return ""

    def desired(self) -> dict[str, Any]:
        members = [{"worker_id": f"decode-{number}"} for number in range(2)]
        return {"desired": {"pools": [{"model": "m", "role": "decode", "count": 2}], "members": members}}

    def events(self, *, count: int) -> dict[str, Any]:
        if self._events is None:
            raise UnavailableError("Redis does not answer")
        return {"events": self._events[-count:], "next": "1"}


def test_status_warns_of_workers_that_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 44.4)
    found = status.look(Admin(WAITS))  # type: ignore[arg-type]
    assert [warning["what"] for warning in found["warnings"]] == [f"decode-1 waits {ROOM}, for 42 s"]
    assert "join a machine" in found["warnings"][0]["fix"]
    assert found["health"] == "degraded"


@pytest.mark.parametrize("events", [None, []])
def test_without_events_nothing_is_made_up(events: list[dict[str, Any]] | None) -> None:
    assert status.look(Admin(events))["warnings"] == []  # type: ignore[arg-type]
