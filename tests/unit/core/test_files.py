"""Test paths, files, hosts, ports and URLs."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import ConfigError
from tandem.core.files import expand_user, unwritable, write_private
from tandem.core.urls import host_port, redacted


def test_a_home_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_user("~/models") == Path("/home/me/models")
    assert expand_user(Path("models/~")) == Path("models/~")


def test_nobodys_home_is_told_as_a_mistake() -> None:
    with pytest.raises(ConfigError, match="cannot find ~nosuchuser/m: ~nosuchuser names no user"):
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
    code = f"from tandem.core.files import unwritable; print(unwritable({name!a}))"
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "this locale has ascii: set LC_ALL=C.UTF-8"


def test_it_replaces_in_one_step_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_lends_it_neither_mode_nor_target(tmp_path: Path) -> None:
    """It may have the name of this process: process ids are used again."""
    path, left, elsewhere = tmp_path / "file", tmp_path / f".file.{os.getpid()}", tmp_path / "elsewhere"
    left.write_bytes(b"left")
    left.chmod(0o644)
    write_private(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    left.unlink(missing_ok=True)
    left.symlink_to(elsewhere)
    write_private(path, b"newer")
    assert (path.read_bytes(), path.is_symlink(), elsewhere.exists()) == (b"newer", False, False)


def test_the_folder_is_synced_behind_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def note(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_private(tmp_path / "file", b"new")
    assert synced == [(False, False), (True, True)]


def test_only_ipv6_addresses_need_brackets() -> None:
    assert host_port("127.0.0.1", 8000) == "127.0.0.1:8000"
    assert host_port("node-1.example", 0) == "node-1.example:0"
    assert host_port("::1", 8000) == "[::1]:8000"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:geheim@host:6379/0?password=geheim", "redis://host:6379/0"),
        ("unix:///run/redis.sock?password=geheim", "unix:///run/redis.sock"),
        ("redis://:geheim@[::1", "the given URL"),
        ("redis://:geheim@[::1]:6379/0", "redis://[::1]:6379/0"),
        ("geheim", "the given URL"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert redacted(url) == shown
