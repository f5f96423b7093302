"""`clusterctl up` from start to end, with a real Redis and small programs in place of workers and router.

Every test ends with nothing left: no process, no socket folder, no lock.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.controlplane.state_dir import StateDir

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.integration.controlplane.up_program"
Until = Callable[[Callable[[], object]], None]


class Up:
    """One `clusterctl up` in a process of its own; its terminal is read line by line."""

    def __init__(
        self,
        state: Path,
        *flags: str,
        worker: tuple[str, ...] = (),
        router: tuple[str, ...] = (),
        terminal: int = subprocess.PIPE,
    ) -> None:
        self.state, self._prefix = state, ["-m", PROGRAM, json.dumps(worker), json.dumps(router)]
        self.process = self._start("up", "--port", "0", "--timeout", "60", *flags, terminal=terminal)
        self.seen: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ctl(self, *arguments: str) -> tuple[int, str, str]:
        """Another clusterctl command beside it: exit code, stdout, stderr."""
        process = self._start(*arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def wait_for(self, text: str) -> str:
        """The next line that contains `text`."""
        while text not in (line := self._lines.get(timeout=60)):
            assert line != "", f"it ended without saying {text!r}: {self.seen}"
        return line

    def end(self) -> tuple[int, str]:
        """Exit code and the last line on stderr, once it has ended."""
        self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        assert self.process.stderr is not None
        return self.process.returncode, self.process.stderr.read().strip()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def member(self, program: str) -> list[psutil.Process]:
        return [child for child in self.family() if program in _command_line(child)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _start(self, *arguments: str, terminal: int = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *self._prefix, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TANDEM_STATE_DIR": str(self.state)},
        )

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.seen.append(line)
            self._lines.put(line)
        self._lines.put("")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def begin(*flags: str, **how: Any) -> Up:
        started.append(Up(tmp_path, *flags, **how))
        return started[-1]

    yield begin
    for up in started:
        up.close()


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also what a zombie raises
        return ""


def _gone(family: list[psutil.Process]) -> bool:
    return not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _sockets(state: Path) -> Path:
    return Path((state / "tandem" / "sockets").read_text())


def test_runs_until_ctrl_c_and_cleans_up(start: Callable[..., Up], tmp_path: Path, until: Until) -> None:
    up = start(worker=("--child",))
    api = up.wait_for("API").split()[-1]
    curl = up.wait_for("curl")
    assert f"{api}/chat/completions" in curl
    assert httpx.get(api.replace("/v1", "/readyz"), trust_env=False).status_code == 200
    family, sockets = up.family(), _sockets(tmp_path)
    assert len(up.member("fake_worker")) == 2
    assert len(up.member("redis-server")) == 1
    up.process.send_signal(signal.SIGINT)
    assert up.end() == (0, "")
    until(lambda: _gone(family))
    assert not sockets.exists()
    assert not StateDir(tmp_path, "tandem").is_held()
    assert any("loading weights" in line for line in up.seen)
    assert re.match(r" +\d+\.\d\d s  \w", up.seen[0])


def test_status_and_down(start: Callable[..., Up], until: Until) -> None:
    up = start("--name", "mine", "--mixed", "1")
    up.wait_for("curl")
    code, out, _ = up.ctl("status", "--name", "mine", "--json")
    assert (code, json.loads(out)["cluster"]) == (0, "mine")
    code, out, _ = up.ctl("status", "--name", "mine")
    assert code == 0
    assert "prefill-0" in out
    family = up.family()
    assert up.ctl("down", "--name", "mine", "--yes")[:2] == (0, "stopped\n")
    assert up.end() == (0, "")
    until(lambda: _gone(family))
    assert up.ctl("status", "--name", "mine")[0] == 1


def test_a_wrong_admin_key_is_refused(start: Callable[..., Up], tmp_path: Path) -> None:
    up = start("--mixed", "1")
    admin = up.wait_for("admin").split()[4].rstrip(",")
    up.wait_for("curl")
    (tmp_path / "key").write_text("wrong")
    code, _, error = up.ctl("status", "--endpoint", admin, "--admin-key-file", str(tmp_path / "key"))
    assert code == 4
    assert "refuses the admin key" in error


def test_nothing_outlives_a_kill(start: Callable[..., Up], tmp_path: Path, until: Until) -> None:
    up = start()
    up.wait_for("curl")
    family, sockets = up.family(), _sockets(tmp_path)
    assert len(family) >= 4
    up.process.kill()
    up.process.wait(timeout=60)
    until(lambda: _gone(family))
    again = start("--mixed", "1")
    again.wait_for("curl")
    assert not sockets.exists()
    again.process.send_signal(signal.SIGTERM)
    assert again.end() == (0, "")


def test_a_second_up_of_the_same_name_is_refused(start: Callable[..., Up]) -> None:
    first = start("--mixed", "1")
    first.wait_for("curl")
    second = start("--mixed", "1")
    code, error = second.end()
    assert code == 2
    assert re.fullmatch(r"clusterctl: cluster 'tandem' is running already: process \d+ holds .*", error)
    other = start("--mixed", "1", "--name", "other")
    other.wait_for("curl")
    assert first.process.poll() is None


def test_a_dead_worker_is_started_again_and_a_dead_router_too(start: Callable[..., Up], until: Until) -> None:
    up = start("--mixed", "1")
    api = up.wait_for("API").split()[-1]
    up.wait_for("curl")
    for program, name in (("fake_worker", "mixed-0"), ("fake_router", "router-0")):
        (before,) = up.member(program)
        before.kill()
        assert name in up.wait_for("exited: killed by signal 9")
        assert "in 0.5 s" in up.wait_for("restart planned")
        assert name in up.wait_for("ready:")
        (after,) = up.member(program)
        assert after.pid != before.pid
    assert httpx.get(api.replace("/v1", "/readyz"), trust_env=False).status_code == 200


def test_a_dead_private_redis_is_started_again(start: Callable[..., Up]) -> None:
    up = start("--mixed", "1")
    up.wait_for("curl")
    (before,) = up.member("redis-server")
    before.kill()
    up.wait_for("answers again")
    assert up.ctl("down", "--yes")[0] == 0
    assert up.end() == (0, "")


@pytest.mark.parametrize(
    ("program", "folder"), [("fake_worker", "config"), ("fake_router", "config"), ("redis-server", "redis")]
)
def test_what_cannot_be_restarted_for_want_of_its_folder_ends_nothing(
    start: Callable[..., Up], tmp_path: Path, program: str, folder: str
) -> None:
    """As with a full disk: nothing can be written for it. It is tried again until it works."""
    up = start("--mixed", "1")
    up.wait_for("curl")
    place, aside = tmp_path / "tandem" / folder, tmp_path / "aside"
    place.rename(aside)
    place.touch()
    (before,) = up.member(program)
    before.kill()
    up.wait_for("it could not be started: ")
    up.wait_for("it could not be started: ")
    place.unlink()
    aside.rename(place)
    up.wait_for("answers again" if program == "redis-server" else "ready: it")
    assert up.ctl("down", "--yes")[0] == 0
    assert up.end() == (0, "")


@pytest.mark.parametrize(
    ("worker", "router", "message"),
    [
        (
            ("--fatal", "kv_memory has no room for one sequence"),
            (),
            "cannot start: kv_memory has no room for one sequence.",
        ),
        (("--fatal", "odd", "--fatal-for", "decode-0"), (), "decode-0 cannot start: odd."),
        (("--crash",), (), "exit code 1; its last line: something about a missing library"),
        ((), ("--refuse", "port 8000 is taken. Choose another."), "the router cannot start: port 8000 is taken"),
    ],
)
def test_a_member_that_cannot_start_ends_it_in_one_line(
    start: Callable[..., Up], until: Until, worker: tuple[str, ...], router: tuple[str, ...], message: str
) -> None:
    up = start(worker=worker, router=router)
    code, error = up.end()
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert not any("restart planned" in line for line in up.seen)
    assert not StateDir(up.state, "tandem").is_held()


@pytest.mark.parametrize(
    ("worker", "router", "patience", "waiting"),
    [
        (("--never-ready",), (), "1.5", "still waiting for mixed-0"),
        # Processes that start before it and the router itself are there by then, on a loaded machine, too.
        ((), ("--unready",), "8", "waiting for the router to answer /readyz"),
    ],
)
def test_a_start_that_hangs_is_given_up(
    start: Callable[..., Up], worker: tuple[str, ...], router: tuple[str, ...], patience: str, waiting: str
) -> None:
    up = start("--mixed", "1", "--timeout", patience, worker=worker, router=router)
    code, error = up.end()
    assert code == 2
    assert f"not ready after {patience} s" in error
    assert waiting in error


def test_ctrl_c_while_starting(start: Callable[..., Up], until: Until) -> None:
    up = start(worker=("--never-ready",))
    up.wait_for("loading weights")
    family = up.family()
    up.process.send_signal(signal.SIGINT)
    assert up.end() == (0, "")
    until(lambda: _gone(family))


STUBBORN_REDIS = """#!{python}
import os, pathlib, signal, time

def stay(number, frame):
    for again in {again}:
        os.kill(os.getppid(), again)

signal.signal(signal.SIGTERM, stay)
pathlib.Path("begun").touch()
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("again", [(), (signal.SIGINT,), (signal.SIGINT, signal.SIGHUP)])
def test_signals_while_redis_is_stopped(
    start: Callable[..., Up],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
    again: tuple[signal.Signals, ...],
) -> None:
    """It does not heed SIGTERM, and is killed. A second signal to `up` changes nothing, a third ends it at once."""
    server, folder = tmp_path / "bin" / "redis-server", tmp_path / "tandem" / "redis"
    server.parent.mkdir()
    server.write_text(STUBBORN_REDIS.format(python=sys.executable, again=[int(one) for one in again]))
    server.chmod(0o700)
    monkeypatch.setenv("PATH", str(server.parent), prepend=os.pathsep)
    up = start()
    until((folder / "begun").exists)
    (redis,) = up.member("redis-server")
    try:
        up.process.send_signal(signal.SIGINT)
        assert up.end() == (130, "")
        if len(again) < 2:
            until(lambda: _gone([redis]))
            assert not (tmp_path / "tandem" / "sockets").exists()
    finally:
        if redis.is_running():
            redis.kill()


def test_a_second_ctrl_c_kills_at_once(start: Callable[..., Up], until: Until) -> None:
    up = start("--mixed", "1", worker=("--stubborn",))
    up.wait_for("curl")
    family = up.family()
    up.process.send_signal(signal.SIGINT)
    up.wait_for("stopping: the cluster stops")
    up.process.send_signal(signal.SIGINT)
    up.wait_for("killing what is left")
    assert up.end() == (0, "")
    until(lambda: _gone(family))


def test_a_taken_port(start: Callable[..., Up]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, error = start("--port", str(port), "--grpc-port", "0").end()
    assert code == 2
    assert error.startswith(f"clusterctl: port {port} on 127.0.0.1 is taken")
    assert "--port" in error


def test_an_unreachable_redis(start: Callable[..., Up]) -> None:
    code, error = start("--redis", "redis://:hush@127.0.0.1:9/0").end()
    assert code == 2
    assert error.startswith("clusterctl: cannot reach Redis at redis://127.0.0.1:9/0")
    assert "hush" not in error
    assert len(error.splitlines()) == 1


def test_secrets_stay_out_of_process_lists(start: Callable[..., Up], tmp_path: Path) -> None:
    up = start("--mixed", "1")
    up.wait_for("curl")
    secrets = [(tmp_path / "tandem" / name).read_text() for name in ("secret", "admin.key")]
    lines = [_command_line(process) for process in up.family()]
    assert not [line for line in lines if any(secret in line for secret in secrets)]


def test_a_terminal_that_goes_away_ends_nothing(start: Callable[..., Up], tmp_path: Path, until: Until) -> None:
    reader, writer = os.pipe()
    up = start("--mixed", "1", terminal=writer)
    os.close(writer)
    state = StateDir(tmp_path, "tandem")
    until(state.context_file.exists)
    os.close(reader)
    until(lambda: up.member("fake_worker"))
    (before,) = up.member("fake_worker")
    before.kill()
    until(lambda: [after for after in up.member("fake_worker") if after.pid != before.pid])
    assert up.ctl("down", "--yes")[0] == 0
    assert up.process.wait(timeout=60) == 0
