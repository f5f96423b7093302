"""The private server: starts, keeps its data, hides its password, and never outlives its parent."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ConfigError, StartupError
from tandem.statestore import embedded_redis
from tandem.statestore.connection import connect, wait_for_redis
from tandem.statestore.embedded_redis import PrivateRedis, find_server
from tools.waiting import wait_for, wait_for_async

PARENT = """
import sys, time
from tandem.statestore.embedded_redis import PrivateRedis
server = PrivateRedis.start(sys.argv[1], "pw")
print(server.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def command(url: str, *words: str) -> Any:
    async def run() -> Any:
        redis: Any = await connect(url)
        try:
            return await redis.execute_command(*words)
        finally:
            await redis.aclose()

    return asyncio.run(run())


def test_data_survives_a_stop_and_a_kill(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "d", 'odd "password" \\ é') as server:
        command(server.url, "SET", "stopped", "yes")
    assert not server.is_alive()
    server.stop()
    server = PrivateRedis.start(tmp_path / "d", "another", port=server.port)
    command(server.url, "SET", "killed", "yes")
    # Writes reach the file at the end of the event loop's turn, so they survive a kill of the process.
    assert command(server.url, "PING") is True
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not server.is_alive())
    with PrivateRedis.start(tmp_path / "d", "another") as server:
        assert command(server.url, "MGET", "stopped", "killed") == [b"yes", b"yes"]


def test_it_is_private_and_durable(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with PrivateRedis.start(folder, "geheim") as server:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir() if path.is_file())
        config = [command(server.url, "CONFIG", "GET", name) for name in ("appendonly", "maxmemory-policy", "bind")]
        assert [value for _, value in config] == [b"yes", b"noeviction", b"127.0.0.1"]
        assert "geheim" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        assert "geheim" not in repr(server)
        assert not any("geheim" in path.read_text(errors="replace") for path in folder.iterdir() if path.is_file())
        with pytest.raises(StartupError, match="password") as refused:
            command(server.url.replace("geheim", "falsch"), "PING")
        assert "falsch" not in str(refused.value)


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "d")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
        parent.wait()
        wait_for(lambda: not is_running(pid))


def test_one_folder_has_one_server(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path, "pw"), pytest.raises(StartupError, match="another Redis uses"):
        PrivateRedis.start(tmp_path, "pw", timeout_s=0.3)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} is taken"):
            PrivateRedis.start(tmp_path, "pw", port=port)


def test_a_port_lost_in_a_race_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        free, ports = embedded_redis._free_port, [other.getsockname()[1]]
        monkeypatch.setattr(embedded_redis, "_free_port", lambda: ports.pop() if ports else free())
        with PrivateRedis.start(tmp_path, "pw") as server:
            assert server.port != other.getsockname()[1]
            assert command(server.url, "PING") is True


KEYS = 24_576
"""Seven seconds of loading, which answers now and then."""


def test_a_server_that_loads_its_data_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes, for time-outs are for silent servers. Loading is slow here by a setting."""
    with PrivateRedis.start(tmp_path / "d", "pw") as server:
        asyncio.run(_fill(server.url, KEYS))
    settings, now_s = embedded_redis._settings, time.monotonic
    monkeypatch.setattr(embedded_redis, "_settings", lambda *of: settings(*of) + "key-load-delay 300\n")
    told: list[str] = []

    def later() -> None:
        told.append("loading")
        monkeypatch.setattr(time, "monotonic", lambda: now_s() + 1000)

    with PrivateRedis.start(tmp_path / "d", "pw", on_loading=later) as server:
        assert told == ["loading"]
        assert command(server.url, "DBSIZE") == KEYS


async def _fill(url: str, keys: int) -> None:
    redis: Any = await connect(url)
    async with redis.pipeline(transaction=False) as pipe:
        for key in range(keys):
            pipe.set(key, "x")
        await pipe.execute()
    await redis.aclose()


def test_a_broken_binary_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho no such luck\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(StartupError):
        PrivateRedis.start(tmp_path / "d", "pw", server=broken)


def test_servers_are_found_on_the_path_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().name == "redis-server"
    own = tmp_path / "valkey-server"
    own.write_text("")
    own.chmod(0o755)
    assert find_server() == own
    own.unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(StartupError, match="no Redis server found"):
        find_server()


def test_an_unreachable_server_and_a_wrong_url_say_so(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path, "geheim") as server:
        pass
    with pytest.raises(StartupError, match=f"cannot reach Redis at redis://127.0.0.1:{server.port}/0") as error:
        asyncio.run(connect(server.url))
    assert "geheim" not in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError):
        asyncio.run(connect("http://:geheim@host"))


def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(StartupError, match="no answer within"):
            asyncio.run(connect(f"redis://127.0.0.1:{port}/0", timeout_s=0.3))


def test_a_server_that_comes_later_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    url = f"redis://127.0.0.1:{port}/0"

    async def scenario() -> None:
        waiting = asyncio.create_task(wait_for_redis(url, within_s=60.0))
        await wait_for_async(lambda: bool(caplog.records))
        words = ["--port", str(port), "--save", "", "--dir", str(tmp_path)]
        process = await asyncio.create_subprocess_exec(find_server(), *words)
        try:
            await asyncio.wait_for(waiting, 30)
        finally:
            process.kill()
            await process.wait()

    asyncio.run(scenario())
    assert [said.message for said in caplog.records] == ["waiting for Redis"]
    with pytest.raises(StartupError, match="cannot reach Redis"):
        asyncio.run(wait_for_redis(url, within_s=0.2))


def test_what_no_wait_changes_is_not_waited_for(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path, "right") as server, pytest.raises(StartupError, match="refuses this password"):
        asyncio.run(wait_for_redis(server.url.replace("right", "wrong"), within_s=60.0))
