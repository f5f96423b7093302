"""Logs read as records: order, tracebacks, what is wanted, what is appended, files that were put aside."""

import http.server
import json
import threading
from pathlib import Path

import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.inspect import log_files
from tandem.clusterctl.inspect.log_files import LogFilter, ParsedRecord, Tail, members, records
from tandem.clusterctl.inspect.logs import moment
from tandem.controlplane.state_dir import Context, StateDir
from tandem.core.errors import ConfigError

FIRST = """2026-11-20T10:00:00.000Z INFO    worker stream opened router=router-0
2026-11-20T10:00:02.500Z WARNING worker attempt failed request=cmpl-1 why=lost
2026-11-20T10:00:03.000Z ERROR   worker it broke
    Traceback (most recent call last):
      ValueError: no
not a record at all
"""
SECOND = "2026-11-20T10:00:01.000Z INFO    router sent request=cmpl-12\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The logs of a cluster called tandem, in a state directory."""
    made = tmp_path / "tandem" / "logs"
    made.mkdir(parents=True)
    (made / "decode-0.log").write_text(FIRST)
    (made / "router-0.log").write_text(SECOND)
    (made / "router-0.log.1").write_text("2026-11-20T09:00:00.000Z INFO    router older\n")
    return made


def run(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    code = program.run(["logs", *arguments, "--state-dir", str(folder.parents[1])])
    return code, *capsys.readouterr()


def test_records_come_in_the_order_of_time(folder: Path) -> None:
    assert members(folder) == ["decode-0", "router-0"]
    found = list(records(folder, members(folder)))
    assert [record.member for record in found] == ["router-0", "decode-0", "router-0", *["decode-0"] * 3]
    assert [record.level for record in found[3:]] == ["WARNING", "ERROR", ""]
    assert found[4].text == "it broke\n    Traceback (most recent call last):\n      ValueError: no"
    assert (found[5].time, found[5].text) == ("2026-11-20T10:00:03.000Z", "not a record at all")


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (LogFilter(request="cmpl-1"), ["attempt failed request=cmpl-1 why=lost"]),
        (LogFilter(level="WARNING"), ["attempt failed request=cmpl-1 why=lost", "it broke"]),
        (LogFilter(since="2026-11-20T10:00:02.6"), ["it broke", "not a record at all"]),
        (LogFilter(since="2026-11-21"), []),
    ],
)
def test_only_what_is_wanted(folder: Path, wanted: LogFilter, texts: list[str]) -> None:
    found = [record for record in records(folder, members(folder)) if wanted.takes(record)]
    assert [record.text.splitlines()[0] for record in found] == texts


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("request=cmpl-1", True),
        ("request=cmpl-1#2", True),
        ("request=cmpl-1-0 attempt=1", True),
        ("cmpl-1-13#1", True),
        ("request=cmpl-1-0x", False),
        ("request=cmpl-1-", False),
        ("request=cmpl-12-0", False),
        ("request=a-cmpl-1-0", False),
    ],
)
def test_a_request_is_named_by_itself_or_by_one_of_its_prompts(text: str, is_named: bool) -> None:
    record = ParsedRecord(member="router-0", time="2026-11-20T10:00:00.000Z", level="INFO", text=text)
    assert LogFilter(request="cmpl-1").takes(record) is is_named


def test_a_tail_gives_what_is_appended_also_to_a_new_file(folder: Path) -> None:
    log = folder / "decode-0.log"
    tail = Tail(log)
    tail.skip()
    assert tail.read() == []
    with log.open("a") as file:
        file.write("2026-11-20T10:00:09.000Z INFO    worker new\n2026-11-20T10:00:09.100Z INFO    wor")
    assert [record.text for record in tail.read()] == ["new"]
    with log.open("a") as file:
        file.write("ker whole\n")
    assert [record.text for record in tail.read()] == ["whole"]
    log.replace(folder / "decode-0.log.1")
    assert tail.read() == [], "it is gone for a moment"
    log.write_text("2026-11-20T10:00:10.000Z INFO    worker begun anew\n")
    assert [record.text for record in tail.read()] == ["begun anew"]


def test_the_command(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, error = run(capsys, folder, "--level", "warning", "decode-0")
    assert (code, error) == (0, "")
    assert out.splitlines()[0] == "2026-11-20T10:00:02.500Z WARNING decode-0    attempt failed request=cmpl-1 why=lost"
    code, out, _ = run(capsys, folder, "router", "-o", "json")
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["older", "sent request=cmpl-12"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["decod-0"], 3, "there is no log of 'decod-0'. Did you mean 'decode-0'?"),
        (["--level", "warn"], 2, "--level is 'warn'. Did you mean 'WARNING'?"),
        (["--since", "yesterday"], 2, "--since is 'yesterday'"),
        (["--name", "other"], 3, "there are no logs in"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], code: int, message: str
) -> None:
    found, out, error = run(capsys, folder, *arguments)
    assert (found, out) == (code, "")
    assert message in error


class _Admin(http.server.BaseHTTPRequestHandler):
    """An admin port: one worker is here, one on another machine (RFC 5737 has addresses that are never assigned)."""

    def do_GET(self) -> None:
        rows = [{"worker": "decode-0", "address": "127.0.0.1:7"}, {"worker": "decode-1", "address": "192.0.2.7:7"}]
        body = json.dumps({"cluster": "tandem", "workers": rows}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_logs_on_other_machines_are_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    state = StateDir(folder.parents[1], "tandem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Admin) as server, state.hold() as held:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        held.draw_secrets()
        admin = f"http://127.0.0.1:{server.server_port}"
        key = str(state.admin_key_file)
        held.write_context(Context(name="tandem", pid=1, api=admin, grpc="", admin=admin, admin_key_file=key))
        try:
            code, out, error = run(capsys, folder, "decode-1")
            assert (code, out) == (3, "")
            assert "the log of decode-1 is not on this machine: it runs on 192.0.2.7" in error
            assert "`clusterctl logs decode-1` there" in error
            code, out, error = run(capsys, folder)
            assert (code, len(out.splitlines())) == (0, 8)
            assert "the logs of decode-1 are on 192.0.2.7" in error
            code, out, error = run(capsys, folder, "decode-0")
            assert (code, error) == (0, "")
        finally:
            server.shutdown()


def test_moments() -> None:
    assert moment("10m", 1_763_632_800.25) == "2025-11-20T09:50:00.250Z"
    assert moment("2026-11-20T14:30:00Z", 0.0) == "2026-11-20T14:30:00"
    assert moment("2026-11-20 14:30:00", 0.0) == "2026-11-20T14:30:00"
    assert moment("", 0.0) == ""
    with pytest.raises(ConfigError):
        moment("10 minutes", 0.0)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_logging_writes_is_read_as_it_was(folder: Path, as_json: bool) -> None:
    """The reader and the writer of `core/logs.py` agree, whatever the format; a tail reads the same."""
    import logging

    from tandem.core.logs import _Formatter

    tail = Tail(folder / "made.log")
    record = logging.LogRecord("x", logging.WARNING, "", 0, "attempt failed", None, None)
    record.fields = {"request": "cmpl-7", "why": "a = b"}
    record.created, record.msecs = 1_763_632_800.25, 250.0
    (folder / "made.log").write_text(_Formatter("router", as_json=as_json).format(record) + "\n")
    (found,) = log_files.records(folder, ["made"])
    assert (found.level, found.text) == ("WARNING", 'attempt failed request=cmpl-7 why="a = b"')
    assert found.time == "2025-11-20T10:00:00.250Z"
    assert LogFilter(request="cmpl-7").takes(found)
    assert tail.read() == [found]


def test_tracebacks_of_json_stand_below_their_record(folder: Path) -> None:
    line = {"time": "2026-11-20T10:00:00.000Z", "level": "ERROR", "component": "router", "event": "it broke",
            "traceback": "Traceback:\n  no"}  # fmt: skip
    (folder / "made.log").write_text(json.dumps(line) + '\n{"ready": true}\n{no json\n')
    found = list(log_files.records(folder, ["made"]))
    assert [(one.level, one.text) for one in found] == [
        ("ERROR", "it broke\n    Traceback:\n      no"), ("", '{"ready": true}'), ("", "{no json"),
    ]  # fmt: skip
