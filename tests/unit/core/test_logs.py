"""Logs: fields beside the event, and silence where they cannot be written."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from tandem.core import logs

LOG = logging.getLogger("tandem.test")


@pytest.fixture(autouse=True)
def _root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("as_json", [False, True])
def test_fields_stand_beside_the_event(as_json: bool) -> None:
    text = StringIO()
    logs.setup("part", as_json=as_json, stream=text)
    logs.event(LOG, "happened", worker="w0", count=3)
    line = text.getvalue()
    if as_json:
        said = json.loads(line)
        assert (said["component"], said["event"], said["worker"], said["count"]) == ("part", "happened", "w0", 3)
    else:
        assert line.endswith("INFO    part happened worker=w0 count=3\n")


def test_a_full_disk_is_not_told_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails as well
    logs.setup("part", stream=stream)
    logs.event(LOG, "happened")
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    assert capsys.readouterr().err == ""
