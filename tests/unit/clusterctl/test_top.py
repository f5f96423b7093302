"""`clusterctl top --follow` while the router restarts: it goes on, and ends where no router comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.clusterctl.inspect import top
from tandem.clusterctl.output import Format, Output
from tandem.core.errors import UnavailableError


class Scripted:
    """Looks as they are given; None: no answer. Each takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: int | None) -> None:
        self._looks, self._now_s = list(looks), 0.0
        monkeypatch.setattr("tandem.clusterctl.inspect.top.time.monotonic", lambda: self._now_s)

    def look(self) -> dict[str, Any]:
        self._now_s += 1.0
        if not self._looks:
            raise KeyboardInterrupt
        found = self._looks.pop(0)
        if found is None:
            raise UnavailableError("nobody answers")
        return {"in_flight": found}


def lines(capsys: pytest.CaptureFixture[str]) -> list[int]:
    return [json.loads(line)["in_flight"] for line in capsys.readouterr().out.splitlines()]


def follow(scene: Any) -> None:
    top._stream(scene, Output(output=Format.JSON), 0.0)


def test_a_router_that_starts_again_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        follow(Scripted(monkeypatch, 1, None, None, 2, *[None] * 29, 3))
    assert lines(capsys) == [1, 2, 3]


def test_one_that_does_not_come_back_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnavailableError):
        follow(Scripted(monkeypatch, 1, *[None] * 31, 2))
    assert lines(capsys) == [1]
    with pytest.raises(UnavailableError):
        follow(Scripted(monkeypatch, None, 1))
    assert lines(capsys) == [], "nor is the first look waited for"
