"""Commands of docs/operate that can run here work as described, in the order of their page."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.pages import PAGES, lines
from tools.running_cluster import Cluster, running

ELSEWHERE = {"helm", "kubectl", "make", "docker"}
"""Programs that other tests try, or that need things that are not here."""


def clusterctl(words: list[str], folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.clusterctl", *words, *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the cluster.toml of the page on installing."""
    found = tmp_path_factory.mktemp("operating")
    [config] = re.findall(r"```toml\n(.*?)```", (PAGES / "install.md").read_text(), re.DOTALL)
    (found / "cluster.toml").write_text(config)
    return found


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Cluster]:
    with running("--config", str(folder / "cluster.toml"), "--engine", "sim", "--anonymous", "loopback") as cluster:
        yield cluster


def follow(page: str, cluster: Cluster, folder: Path) -> list[list[str]]:
    """Run the page's commands; return those that were run."""
    done = []
    for words in lines(page):
        program = Path(words[0]).name
        assert program == "clusterctl" or program in ELSEWHERE, words
        if program != "clusterctl" or words[1] == "up":
            continue
        needs_no_cluster = words[1] in ("plan", "config", "completion")
        flags = [] if needs_no_cluster or "--config" in words else ["--state-dir", str(cluster.folder)]
        found = clusterctl(words[1:], folder, *flags)
        may_find_errors = words[1] == "doctor"  # of this machine, which is as it is
        assert found.returncode in ((0, 7) if may_find_errors else (0,)), (words, found.stdout, found.stderr)
        done.append(words[1:])
    return done


def test_install(started: Cluster, folder: Path) -> None:
    done = follow("install", started, folder)
    assert [words[0] for words in done] == [
        "config", "doctor", "status", "net", "key", "scale", "scale", "get", "scale", "events",
    ]  # fmt: skip
    dry = next(words for words in lines("install") if words[1:2] == ["up"] and "--dry-run" in words)
    elsewhere = ["--port", "0", "--grpc-port", "0", "--admin-port", "0", "--state-dir", str(folder / "dry")]
    shown = clusterctl(dry[1:], folder, *elsewhere)
    assert shown.returncode == 0, shown.stderr
    assert clusterctl(["get", "workers"], folder, "--state-dir", str(started.folder)).stdout.count("decode-") == 1


def test_upgrade(started: Cluster, folder: Path) -> None:
    done = follow("upgrade", started, folder)
    assert [words[:2] for words in done if words[0] == "rollout"] == [
        ["rollout", "start"], ["rollout", "start"], ["rollout", "status"], ["rollout", "undo"],
    ]  # fmt: skip


def test_security(started: Cluster, folder: Path) -> None:
    assert [words[0] for words in follow("security", started, folder)] == ["key", "key", "doctor"]


def test_choosing_pd(started: Cluster, folder: Path) -> None:
    """Over a fast link the cheapest are pairs, over a slow one workers that do both, as the page has it."""
    assert [words[0] for words in follow("choosing-pd", started, folder)] == ["plan", "plan"]
    found = [clusterctl(words[1:], folder, "-o", "json") for words in lines("choosing-pd")]
    fast, slow = (json.loads(each.stdout)["best"] for each in found)
    assert (fast["prefill"] is None, slow["prefill"] is None) == (False, True)
