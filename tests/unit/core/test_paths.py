"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core.errors import ConfigError
from tandem.core.paths import written_out


def test_a_home_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert written_out("~/models") == Path("/home/me/models")
    assert written_out(Path("models/~")) == Path("models/~")


def test_nobodys_home_is_told_as_a_mistake() -> None:
    with pytest.raises(ConfigError, match="cannot find ~nosuchuser/m: ~nosuchuser is nobody's home"):
        written_out("~nosuchuser/m")
