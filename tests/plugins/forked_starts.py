"""Starts of Python processes by forking a warmed template, in place of interpreters that import everything anew.

Tests start hundreds of clusters, and most of the CPU time of a start is Python that imports torch, fastapi and gRPC.
`subprocess` asks the template process (`tests.plugins.template`) for `python -m MODULE …` of the product. All else, and
what asks for something that a fork cannot give, is started as ever. `--exec` and the mark `exec_start` start all so.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.plugins.template_start import Start, send

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXED = (
    "PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "ATEN_",
    "ONEDNN_", "DNNL_", "GRPC_", "TRITON_", "CUDA_", "RAY_", "UV_", "OPENSSL_", "SSL_", "TZ", "TANDEM_",
)  # fmt: skip
"""Variables, by their beginnings, that are read when modules are imported: a fork must have those of its template."""
FREE = (
    "TANDEM_STATE_DIR", "TANDEM_MODELS_DIR", "TANDEM_LOG_FORMAT", "TANDEM_TEST_SEED", "OMP_NUM_THREADS",
    "PYTHONBREAKPOINT", "GRPC_VERBOSITY", "GLIBC_TUNABLES",
)  # fmt: skip
"""Exceptions: what is read later, and what changes nothing but speed."""
FORKED = (
    "tandem.", "bench.gpu", "proof.transfer.sender_process", "tests.integration.controlplane.",
    "tests.integration.engine.sim_program", "tests.integration.engine.tp_program", "tests.integration.kvtransfer.",
    "tests.integration.plugins.",
)  # fmt: skip
"""Modules that forks run, by their beginnings: the product, and test programs that do not measure their own memory."""
STARTERS = (
    "tandem.worker", "tandem.clusterctl", "tandem.controlplane.ray.driver", "tests.integration.controlplane.up_program",
    "tests.integration.plugins.owner_program",
)  # fmt: skip
"""Modules that start processes."""
LIMITS = (
    resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC, resource.RLIMIT_STACK,
)  # fmt: skip
_TIED = ["-ISE", str(ROOT / "core/tandem/core/parent_death_signal.py")]
_fork_exec: Any = vars(subprocess)["_fork_exec"]
reasons: collections.Counter[str] = collections.Counter()
"""How processes were started, and why not by a fork."""


class ForkedStarts:
    """The plugin of a process that runs tests. Its template is started with the first process that can be forked."""

    def __init__(self) -> None:
        self._template = Template()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("exec_start") is None:
            patch(self._template)
        else:
            unpatch()

    def pytest_sessionfinish(self) -> None:
        unpatch()
        self._template.close()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if reasons:
            said = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            terminalreporter.write_line(f"processes started: {said}")


class Template:
    """The owner's end of a template process: of `connection`, or of one that is started when it is first needed."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection, self._is_lazy = connection, connection is None
        self._fixed, self._namespaces = fixed(dict(os.environ)), _namespaces()
        self._process: subprocess.Popen[bytes] | None = None
        self._parent: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The template process that this one started."""
        assert self._process is not None
        return self._process

    def suits(self, environment: dict[str, str]) -> bool:
        """True if a fork can have this environment: the template's, but for variables that are read late."""
        return fixed(environment) == (fixed(dict(os.environ)) if self._connection is None else self._fixed)

    def is_here(self) -> bool:
        """True if the calling thread is in the template's namespaces, where forks will be."""
        return self._namespaces == _namespaces()

    def start(self, start: Start, descriptors: list[int]) -> int | None:
        """Fork the process and return its id; None without a template."""
        with self._lock:
            for _ in range(2):
                if (connection := self._connected()) is None:
                    return None
                try:
                    return send(connection, start, descriptors)
                except (OSError, EOFError):  # it was ended
                    self._close()
        return None

    def close(self) -> None:
        with self._lock:
            self._close()

    def _connected(self) -> socket.socket | None:
        if self._connection is None and self._is_lazy:
            self._connection, theirs = socket.socketpair()
            self._fixed = fixed(dict(os.environ))
            started = threading.Event()
            # For the kernel the parent of a fork is the thread that started its template, and forks die with it.
            self._parent = threading.Thread(target=self._run, args=(theirs, started), daemon=True)
            self._parent.start()
            started.wait()
        return self._connection

    def _run(self, theirs: socket.socket, started: threading.Event) -> None:
        with theirs, _unpatched():
            command = [sys.executable, "-m", "tests.plugins.template", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )  # fmt: skip
        started.set()
        self._process.wait()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._parent is not None:
            self._parent.join()
            if self.process.returncode > 0:  # by itself: it cannot do better the next time
                self._is_lazy = False
            self._process = self._parent = None


def patch(template: Template) -> None:
    """Have `subprocess` start processes by forks of this template."""
    vars(subprocess)["_fork_exec"] = lambda *call: _start(template, call)


def unpatch() -> None:
    """Have `subprocess` start all processes as ever."""
    vars(subprocess)["_fork_exec"] = _fork_exec


@contextlib.contextmanager
def _unpatched() -> Iterator[None]:
    current = vars(subprocess)["_fork_exec"]
    unpatch()
    try:
        yield
    finally:
        vars(subprocess)["_fork_exec"] = current


def fixed(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that a fork and its template must have in common."""
    return {name: value for name, value in environment.items() if name.startswith(FIXED) and name not in FREE}


def is_forkable(arguments: list[str]) -> bool:
    """True if it is `python -m MODULE …` of a module that forks may run."""
    return len(arguments) > 2 and arguments[:2] == [sys.executable, "-m"] and arguments[2].startswith(FORKED)


def starts_processes(arguments: list[str]) -> bool:
    """True if such a process needs a template of its own."""
    return arguments[2] in STARTERS and (arguments[2] != "tandem.clusterctl" or "up" in arguments)


def untied(arguments: list[str]) -> tuple[tuple[int, int] | None, list[str]]:
    """Return the words that `parentdeath.tied` put before a command (signal, parent), and the command."""
    if arguments[1:3] == _TIED and len(arguments) > 5:
        return (int(arguments[3]), int(arguments[4])), arguments[5:]
    return None, arguments


def ignored() -> list[int]:
    """Signals that this process ignores."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]


def blocked() -> list[int]:
    """Signals that this thread blocks."""
    return [*signal.pthread_sigmask(signal.SIG_BLOCK, [])]


def _start(template: Template, call: tuple[Any, ...]) -> int:
    """In place of `_posixsubprocess.fork_exec`, with its arguments."""
    (words, executables, close_fds, kept, cwd, environment, stdin, _, _, stdout, _, stderr, _, error_pipe,
     _, new_session, group, gid, gids, uid, umask, preexec, *_) = call  # fmt: skip
    tied, command = untied([os.fsdecode(word) for word in words])
    variables = _variables(_inherited() if environment is None else environment)
    folder = os.path.abspath(os.fsdecode(cwd or "."))
    reason = "by forks"
    if not is_forkable(command):
        reason = "of other programs"
    elif executables != (os.fsencode(sys.executable),) or not close_fds or preexec or (gid, gids, uid) != (None,) * 3:
        reason = "with what a fork cannot give"
    elif not template.is_here():
        reason = "in other namespaces"
    elif not template.suits(variables):
        reason = "with another environment"
    elif not Path(folder).is_dir():
        reason = "in no folder"
    else:
        places = {0: stdin, 1: stdout, 2: stderr} | {number: number for number in kept if number != error_pipe}
        places = {number: at if at >= 0 else number for number, at in places.items()}
        places = {number: at for number, at in places.items() if _is_open(at)}
        limits = {number: resource.getrlimit(number) for number in LIMITS}
        start = Start(
            command, variables, folder, [*places], tied, new_session,
            os.getpgid(0) if group < 0 and not new_session else group, umask, ignored(), blocked(), limits,
            [*os.sched_getaffinity(0)],
        )  # fmt: skip
        if (pid := template.start(start, [*places.values()])) is not None:
            reasons[reason] += 1
            return pid
        reason = "without a template"
    reasons[reason] += 1
    return int(_fork_exec(*call))


def _namespaces() -> list[str]:
    return [os.readlink(f"/proc/thread-self/ns/{name}") for name in ("net", "mnt", "user", "ipc")]


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def _inherited() -> list[bytes]:
    """Return the environment that an exec hands on: also variables set by C code, which `os.environ` does not have."""
    pointers: Any = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    return list(itertools.takewhile(lambda each: each is not None, pointers))


def _variables(environment: list[bytes]) -> dict[str, str]:
    pairs = (os.fsdecode(each).partition("=") for each in environment)
    return {name: value for name, _, value in pairs}
