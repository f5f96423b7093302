"""Paths as people write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import ConfigError
from tandem.core.paths import expand_user, unwritable


def test_a_home_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_user("~/models") == Path("/home/me/models")
    assert expand_user(Path("models/~")) == Path("models/~")


def test_nobodys_home_is_told_as_a_mistake() -> None:
    with pytest.raises(ConfigError, match="cannot find ~nosuchuser/m: ~nosuchuser is nobody's home"):
        expand_user("~nosuchuser/m")


@pytest.mark.parametrize("given", ["models/modél", Path("/m"), "", "\U0001f600"])
def test_text_can_be_handed_over(given: str | Path) -> None:
    assert unwritable(given) == ""


@pytest.mark.parametrize("given", ["mod\udce9l", Path("/a\udcff/b")])
def test_bytes_that_are_no_text_cannot(given: str | Path) -> None:
    assert unwritable(given) == "that is no UTF-8 text"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mod\udcc3\udca9l", "modél"])
def test_of_a_locale_that_lacks_letters_another_is_asked_for(name: str) -> None:
    """Once as that locale reads it from the command line, once as it comes out of a file in UTF-8."""
    code = f"from tandem.core.paths import unwritable; print(unwritable({name!a}))"
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "this locale has ascii: set LC_ALL=C.UTF-8"
