"""Logs: fields beside the event, and silence where they cannot be written."""

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


def test_no_field_takes_the_place_of_what_a_line_says_of_itself() -> None:
    text = StringIO()
    logs.setup("part", as_json=True, stream=text)
    logs.event(LOG, "happened", time="never", component="other", event="another", request="cmpl-1")
    said = json.loads(text.getvalue())
    assert (said["component"], said["event"], said["request"]) == ("part", "happened", "cmpl-1")
    assert said["time"].startswith("20")
    assert (said["time_"], said["component_"], said["event_"]) == ("never", "other", "another")


def test_a_full_disk_is_not_told_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails as well
    logs.setup("part", stream=stream)
    logs.event(LOG, "happened")
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "value",
    ["x\n2026-01-01T00:00:00.000Z INFO    router key created tenant=admin", "x\r", "x\u2028", "gone tenant=a", '"x'],
)
def test_a_value_cannot_pass_for_another_record_or_pair(value: str) -> None:
    text = StringIO()
    logs.setup("part", stream=text)
    logs.event(LOG, "ended", plain="it said nothing for 2.5 s", reason=value, last="end")
    (line,) = text.getvalue().splitlines()
    assert " ended plain=it said nothing for 2.5 s reason=" in line
    assert json.loads(line.partition(" reason=")[2].removesuffix(" last=end")) == value


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_cannot_pass_for_another_record(as_json: bool) -> None:
    text = StringIO()
    logs.setup("part", as_json=as_json, stream=text)
    try:
        raise ValueError("one\n2026-01-01T00:00:00.000Z INFO    router key created")
    except ValueError:
        LOG.exception("a step failed")
    first, *rest = text.getvalue().splitlines()
    if as_json:
        assert not rest
        assert json.loads(first)["traceback"].endswith("INFO    router key created")
    else:
        assert first.endswith("ERROR   part a step failed")
        assert len(rest) > 3
        assert all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize("as_json", [False, True])
def test_stacks_stand_where_a_traceback_would(as_json: bool) -> None:
    text = StringIO()
    logs.setup("part", as_json=as_json, stream=text)
    logs.event_with_stacks(LOG, "stacks", logging.WARNING, "thread a:\n  one\nthread b:\n  two", decodes=3)
    first, *rest = text.getvalue().splitlines()
    if as_json:
        found = json.loads(first)
        assert (found["decodes"], found["traceback"]) == (3, "thread a:\n  one\nthread b:\n  two")
        assert not rest
    else:
        assert first.endswith("WARNING part stacks decodes=3")
        assert [line.strip() for line in rest] == ["thread a:", "one", "thread b:", "two"]
        assert all(line.startswith("    ") for line in rest)
