"""The template process: it has imported what the product imports, and makes processes of `python -m …` by forking.

`python -m tests.plugins.template FD` is started by the process that forks are made for, its owner, and serves it over
the Unix socket FD until that closes. A fork becomes a child of the *owner* (CLONE_PARENT), with the arguments, the
environment, descriptors, folder, group, limits and signals that it would have had after an exec, also in `/proc`. What
starts processes itself gets a template of its own, forked before it begins. Linux on x86-64 with glibc only.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import mmap
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tandem.core.parent_death_signal import die_with_parent
from tests.plugins import forked_starts
from tests.plugins.template_start import LENGTH, Start, receive

WARM = (
    "torch", "numpy", "safetensors.torch", "tandem.worker.rank", "tandem.worker.model_loading",
    "tandem.worker.sim_loading", "tandem.workerhost.host", "tandem.router.server.main", "tandem.clusterctl.main",
    "tandem.clusterctl.lifecycle.up",
)  # fmt: skip
_HIGH_FD = 1000
"""Descriptors of a start are moved above this one before they take their places; a template's own stays there."""
_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to a group of processes are not meant for a template in it."""
_SYS_CLONE, _CLONE_PARENT = 56, 0x8000
_TID_OFFSET = 0x2D0
"""Of `tid` in glibc's `struct pthread`; held against the real one before it is used."""
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_UNFLUSHED = 120
"""The interpreter's exit status when it cannot write what is left of its output."""
_real_execve = os.execve
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.pthread_self.restype = _libc.sbrk.restype = ctypes.c_void_p


class UnsuitableError(Exception):
    """This machine cannot make such forks."""


def main() -> NoReturn:
    """Import, then serve. Raises UnsuitableError, or SystemExit in a fork that has run."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise UnsuitableError("forks for another process are made on x86-64 Linux alone")
    if _tid().value != os.getpid():
        raise UnsuitableError("this C library keeps the id of a thread elsewhere")
    _show(sys.orig_argv, dict(os.environ))
    for name in WARM:
        importlib.import_module(name)
    if (threads := _threads()) != 1:
        raise UnsuitableError(f"{threads} threads run after the imports")
    gc.collect()
    gc.freeze()
    serve(connection)


def serve(connection: socket.socket) -> NoReturn:
    """Fork what the owner asks for, until it is gone."""
    for number in _OTHERS:
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            start, passed = receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        if not (pid := _fork()):
            become(start, passed)
        for descriptor in passed:
            os.close(descriptor)
        try:
            connection.sendall(LENGTH.pack(pid))
        except OSError:
            os._exit(0)


def become(start: Start, passed: list[int]) -> NoReturn:
    """Be the process that was asked for, from its first line to SystemExit."""
    _take_places(passed, start.descriptors)
    if start.new_session:
        os.setsid()
    if start.group >= 0:
        os.setpgid(0, start.group)
    if start.umask >= 0:
        os.umask(start.umask)
    _set_signals(start.ignored, start.blocked)
    for which, limit in start.limits.items():
        soft, hard = limit
        if resource.getrlimit(int(which)) != (soft, hard):
            resource.setrlimit(int(which), (soft, hard))
    os.sched_setaffinity(0, start.cores)
    os.chdir(start.folder)
    if start.tied is not None:
        die_with_parent(start.tied[1], start.tied[0])
    _run(start.arguments, start.environment)


def _run(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """The program of a new process, or of this one after an exec, to SystemExit."""
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    os.environ.update(environment)
    _show(arguments, environment)
    _open_streams()
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        sys.modules["torch"].set_num_threads(int(threads))
    if forked_starts.starts_processes(arguments):
        _fork_template()
    fixed = forked_starts.fixed(environment)
    vars(os)["execve"] = lambda path, words, variables: _exec(fixed, path, words, variables)
    sys.orig_argv[:] = arguments
    sys.argv[:] = ["-m", *arguments[3:]]
    sys.path[0] = os.getcwd()
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules.pop(arguments[2], None)  # it runs as `__main__`
    runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    raise SystemExit(0)


def _exec(fixed: dict[str, str], path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """`os.execve`, without a new interpreter if it becomes what a fork may be. Its callers are not unwound."""
    command, variables = list(words), dict(environment)
    is_python = path == sys.executable and forked_starts.is_forkable(command)
    if not is_python or forked_starts.fixed(variables) != fixed or _threads() != 1:
        _real_execve(path, command, variables)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not os.get_inheritable(descriptor):
                os.close(descriptor)
    _set_signals(forked_starts.ignored(), forked_starts.blocked())
    try:
        _run(command, variables)
    except BaseException as raised:  # noqa: BLE001 - the top of a process
        end(raised)


def end(raised: BaseException) -> NoReturn:
    """End the process as the interpreter does when this is raised to its top, without taking modules apart."""
    status = 1
    if not isinstance(raised, SystemExit):
        sys.excepthook(type(raised), raised, raised.__traceback__)
    elif isinstance(raised.code, int | None):
        status = raised.code or 0
    else:
        print(raised.code, file=sys.stderr)
    vars(threading)["_shutdown"]()
    vars(atexit)["_run_exitfuncs"]()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:
            status = _UNFLUSHED
            with contextlib.suppress(OSError):
                os.write(2, f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n".encode())
    if isinstance(raised, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _fork_template() -> None:
    """Give this process a template of its own."""
    ours, theirs = socket.socketpair()
    owner = os.getpid()
    if os.fork():
        theirs.close()
        high = fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, _high_fd())
        forked_starts.patch(forked_starts.Template(socket.socket(fileno=high)))
        return
    _take_places([os.open(os.devnull, os.O_RDWR), theirs.detach()], [0, 3])
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.chdir("/")
    forked_starts.unpatch()
    die_with_parent(owner)
    _show([sys.executable, "-m", "tests.plugins.template", "3"], dict(os.environ))
    serve(socket.socket(fileno=3))


def _fork() -> int:
    """Fork as `os.fork`, but the child is one of this process's parent."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc.syscall(_SYS_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        _tid().value = os.getpid()  # glibc does not learn it when the kernel is asked directly
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone failed")
    return pid


def _tid() -> ctypes.c_int:
    """Return the place where the C library keeps the id of this thread."""
    return ctypes.c_int.from_address(_libc.pthread_self() + _TID_OFFSET)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _high_fd() -> int:
    """Above what programs use, and half of what a process with a low limit may have."""
    return min(_HIGH_FD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _take_places(passed: list[int], numbers: list[int]) -> None:
    """Put descriptors at their numbers and close all others."""
    first = _high_fd()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first) for descriptor in passed]
    os.closerange(0, first)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    os.closerange(first, max(high, default=first) + 1)


def _set_signals(ignored: list[int], blocked: list[int]) -> None:
    """Set signals as after an exec and the interpreter's start: ignored ones stay so, others have their default."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        is_ignored = number in ignored or number in (signal.SIGPIPE, signal.SIGXFSZ)
        with contextlib.suppress(OSError):  # the C library's own
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _open_streams() -> None:
    """`sys.stdin`, `stdout` and `stderr` on the new descriptors, as the interpreter makes them."""
    is_buffered = not os.environ.get("PYTHONUNBUFFERED")
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream: Any = None
        with contextlib.suppress(OSError):
            os.fstat(number)
            model = getattr(sys, f"__{name}__")
            raw: Any = io.FileIO(number, mode, closefd=False)
            is_raw = not is_buffered and mode == "w"
            layer = io.BufferedReader(raw) if mode == "r" else raw if is_raw else io.BufferedWriter(raw)
            stream = io.TextIOWrapper(
                layer, encoding=model.encoding, errors=model.errors, newline=None if mode == "r" else "\n",
                line_buffering=is_buffered and (number == 2 or raw.isatty()), write_through=not is_buffered,
            )  # fmt: skip
            stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack", "arg_start",
            "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


_shown: list[mmap.mmap] = []
"""Memory that the kernel reads for /proc."""


def _show(arguments: list[str], environment: dict[str, str]) -> None:
    """Have /proc show these arguments and this environment. Raises UnsuitableError where the kernel does not let us."""
    stat = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    code, code_end, stack, data, data_end, heap = (int(stat[n - 3]) for n in (26, 27, 28, 45, 46, 47))  # as in proc(5)
    shown = _MemoryMap(
        code, code_end, data, data_end, heap, _libc.sbrk(0), stack, *_keep(arguments),
        *_keep([f"{name}={value}" for name, value in environment.items()]), 0, 0, 0xFFFFFFFF,
    )  # fmt: skip
    size = ctypes.c_ulong(ctypes.sizeof(shown))
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(shown), size, 0) != 0:
        raise UnsuitableError(f"prctl(PR_SET_MM_MAP) failed: {os.strerror(ctypes.get_errno())}")


def _keep(words: list[str]) -> tuple[int, int]:
    """Addresses of the first byte of these words and of the one behind them, in memory that stays."""
    data = b"".join(os.fsencode(word) + b"\0" for word in words)
    memory = mmap.mmap(-1, len(data) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(data)
    _shown.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return address, address + len(data)


if __name__ == "__main__":
    sys.modules["tests.plugins.template"] = sys.modules["__main__"]
    try:
        main()
    except UnsuitableError as unsuitable:
        sys.exit(f"processes of tests start slowly here: {unsuitable}")
    except BaseException as raised:  # noqa: BLE001 - the top of a forked process, too
        end(raised)
