"""The state directory: one owner, private files, short socket paths, nothing stale."""

import fcntl
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from tandem.controlplane.environment import Environment
from tandem.controlplane.prog_name import called
from tandem.controlplane.state_dir import Context, StateDir
from tandem.core.errors import ConfigError, StartupError, UnavailableError

CONTEXT = Context(name="a", pid=1, api="http://h:1", grpc="h:2", admin="http://h:3", admin_key_file="k")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path) -> None:
    state = StateDir(tmp_path, "a")
    assert not state.is_held()
    with state.hold():
        assert state.is_held()
        with pytest.raises(StartupError, match=rf"'a' is running already: process {os.getpid()} .*clusterctl down"):
            state.hold()
        with StateDir(tmp_path, "b").hold():
            pass
    assert not state.is_held()
    with state.hold():
        pass


def test_secrets_are_private_and_stay_the_same(tmp_path: Path) -> None:
    state = StateDir(tmp_path, "a")
    with state.hold() as held:
        token = held.draw_secrets().derive(b"any")
        key = state.admin_key_file.read_text()
    assert _mode(state.path) == 0o700
    assert _mode(state.secret_file) == _mode(state.admin_key_file) == 0o600
    assert len(key) > 32
    with state.hold() as held:
        assert held.draw_secrets().derive(b"any") == token
    assert state.admin_key_file.read_text() == key


def test_socket_paths_are_short_private_and_removed(tmp_path: Path) -> None:
    state = StateDir(tmp_path, "x" * 40)
    with state.hold() as held:
        sockets = held.make_socket_dir(Path("/tmp"))
        assert _mode(sockets) == 0o700
        assert len(str(sockets)) < 50
    assert not sockets.exists()


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    state = StateDir(tmp_path, "a")
    with state.hold() as held:
        old = held.make_socket_dir(Path("/tmp"))
        held.write_context(CONTEXT)
        new = held.make_socket_dir(Path("/tmp"))
        assert not old.exists()
        assert not state.context_file.exists()
        assert new.is_dir()


def test_context_is_there_only_while_the_cluster_runs(tmp_path: Path) -> None:
    state = StateDir(tmp_path, "a")
    with pytest.raises(UnavailableError, match="no cluster 'a' is running here"):
        state.read_context()
    with state.hold() as held:
        with pytest.raises(UnavailableError, match="still starting"):
            state.read_context()
        held.write_context(CONTEXT)
        assert state.read_context() == CONTEXT
    assert not state.context_file.exists()


def test_who_asks_for_the_wrong_name_reads_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "ended").mkdir()
    asked = StateDir(tmp_path, "a")
    wrong = pytest.raises(UnavailableError, match=r"\. Add --name for one that runs here \(b, c\), start one with")
    with StateDir(tmp_path, "b").hold(), StateDir(tmp_path, "c").hold(), wrong:
        asked.read_context()
    with pytest.raises(UnavailableError, match=r"\. Start one with"):
        asked.read_context()


def test_what_a_killed_run_left_is_no_running_cluster(tmp_path: Path) -> None:
    state = StateDir(tmp_path, "a")
    with state.hold() as held:
        held.write_context(CONTEXT)
        kept = state.context_file.read_bytes()
    state.context_file.write_bytes(kept)
    with pytest.raises(UnavailableError, match="no cluster 'a' is running here"):
        state.read_context()


def test_somebody_who_asks_whether_it_runs_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(tmp_path, "a")
    with state.hold():
        pass
    with (state.path / "lock").open("r+") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)  # as `is_held` does for a moment
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(asking, fcntl.LOCK_UN))
        with state.hold():
            assert state.is_held()


def test_messages_name_the_program_as_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "clusterctl"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "argv", [str(program)])
    with pytest.raises(UnavailableError, match=f"Start one with `{program} up`"):
        StateDir(tmp_path, "a").read_context()
    monkeypatch.setenv("PATH", str(program.parent))
    assert called() == "clusterctl"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "__main__.py")])
    assert called() == "clusterctl"


def test_configurations_are_private(tmp_path: Path) -> None:
    with StateDir(tmp_path, "a").hold() as held:
        assert _mode(held.write_config("router-0", CONTEXT)) == 0o600


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a b", "x" * 41])
def test_names_that_cannot_be_folders(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a cluster's name"):
        StateDir(tmp_path, name)


def test_a_state_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"cannot use the state directory.*--state-dir"):
        StateDir(tmp_path / "file", "a").hold()


@pytest.mark.parametrize("name", ["TANDEM_STATE_DIR", "XDG_STATE_HOME"])
def test_a_state_directory_whose_name_is_no_text(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot keep state in '/st\\udce9.*: that is no UTF-8 text.*TANDEM_STATE_DIR"
    ):
        Environment.read({name: "/st\udce9"})


def test_where_the_environment_says() -> None:
    assert Environment.read({"TANDEM_STATE_DIR": "/x"}).state_root == Path("/x")
    assert Environment.read({"XDG_STATE_HOME": "/y"}).state_root == Path("/y/tandem")
    assert Environment.read({}).state_root == Path.home() / ".local/state/tandem"
    assert Environment.read({"XDG_RUNTIME_DIR": "/" + "long" * 20}).socket_root == Path("/tmp")
