"""C code of this package: compiled when the package is installed, loaded without holding the interpreter lock.

Owns compiler, cache and loading; knows no operation. A library is named by a hash of source, headers, flags and
machine architecture, and lies beside its source (`installing.py`), in the wheel and in a checkout. One that is missing
is compiled into a cache, by one process of the machine while others wait for it. A source picks its CPU features when
it runs, so a library works on every machine of its architecture.

Without library and compiler, or with `TANDEM_NATIVE=0`, `load` gives None and its caller takes another path with the
same results. `TANDEM_NATIVE=compile` passes over what was installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem.core.cpu_level import named_level
from tandem.core.logs import event
from tandem.kernels.build_lock import WATCH, draft_of, one_maker, remove_stale_drafts

ENVIRONMENT_VARIABLE = "TANDEM_NATIVE"
CACHE_VARIABLE = "TANDEM_NATIVE_CACHE"
"""A folder for compiled libraries where this user's cache cannot be written."""
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
LIBRARIES = ("-lm", "-ldl")
BUILD_TIMEOUT_S = 600.0
_COMPILERS = ("cc", "gcc", "clang")
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_building: dict[Path, threading.Lock] = {}
_loaded: dict[Path, ctypes.CDLL | None] = {}
_tidied: set[Path] = set()


_is_enabled = os.environ.get(ENVIRONMENT_VARIABLE, "1") != "0"


def is_enabled() -> bool:
    """True if native code may be used: not if the process began with `TANDEM_NATIVE=0`, or if it was switched off."""
    return _is_enabled


def enable(is_on: bool) -> bool:
    """Switch native code on or off from now on, for tests and measurements; return the former state."""
    global _is_enabled
    was_on, _is_enabled = _is_enabled, is_on
    return was_on


def load(source: Path) -> ctypes.CDLL | None:
    """The library built from one C file and headers in its folder and its neighbours, or None where native code is off
    or cannot be built (logged once).

    Thread-safe; the first call may compile for seconds, so make it at start. Calls of the library's functions release
    the interpreter lock. Raises ConfigError where TANDEM_CPU_LEVEL names no level.
    """
    if not is_enabled():
        return None
    named_level()  # which the code obeys when it chooses its path: an unknown name is refused here
    with _lock:
        one_at_a_time = _building.setdefault(source, threading.Lock())
    with one_at_a_time:
        if source not in _loaded:
            try:
                _loaded[source] = _open(source)
            except (OSError, subprocess.SubprocessError) as error:
                why = getattr(error, "stderr", None) or str(error)
                event(_log, "native code not available", logging.WARNING, source=source.name, error=str(why)[-2000:])
                _loaded[source] = None
        return _loaded[source]


def build(source: Path, target: Path) -> None:
    """Compile `source` into the shared library `target`. Raises OSError or subprocess.SubprocessError."""
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler: none of {', '.join(_COMPILERS)} is on PATH")
    command = [compiler, *FLAGS, "-o", str(target), str(source), *LIBRARIES]
    with WATCH.running():
        event(_log, "compiling a kernel", kernel=source.parent.name)
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)


def installed(source: Path) -> Path:
    """Path of a source's library in the installation; it need not exist."""
    return source.with_name(f"{source.stem}-{_key(source)}.so")


def make(source: Path, library: Path) -> None:
    """Compile `source` into `library` unless it is there; another process that does so is waited for. Others see a
    whole file or none. Raises OSError or subprocess.SubprocessError."""
    with one_maker(library):
        if library.exists():
            return
        with draft_of(library) as draft:
            build(source, draft)
            with draft.open("rb") as built:
                os.fsync(built.fileno())
            draft.chmod(0o755)
            draft.replace(library)


def _open(source: Path) -> ctypes.CDLL:
    """Load a source's library. From the installation, else from a cache, else compiled into a cache, else compiled into
    a directory that lives only until it is loaded."""
    if os.environ.get(ENVIRONMENT_VARIABLE) != "compile":
        with suppress(OSError):  # it is not there, or of another system
            return ctypes.CDLL(str(installed(source)))
    name = f"{source.parent.name}-{_key(source)}.so"
    for directory in _cache_directories():
        _tidy(directory)
        try:
            return _open_cached(source, directory / name)
        except OSError as error:
            event(_log, "native cache not usable", logging.DEBUG, directory=str(directory), error=str(error))
    with tempfile.TemporaryDirectory(prefix="tandem-native-") as private:
        build(source, Path(private, name))
        return ctypes.CDLL(str(Path(private, name)))


def _open_cached(source: Path, path: Path) -> ctypes.CDLL:
    """Load `path`, made first where it is missing or broken."""
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink(missing_ok=True)
    make(source, path)
    return ctypes.CDLL(str(path))


def _tidy(directory: Path) -> None:
    """Remove stale drafts, once in a process, before it builds anything in `directory`."""
    with _lock:
        if directory not in _tidied:
            _tidied.add(directory)
            remove_stale_drafts(directory)


def _cache_directories() -> Iterator[Path]:
    """Cache directories, best first; not those that cannot be made, nor those in which others could place a library."""
    base, aside = os.environ.get("XDG_CACHE_HOME"), os.environ.get(CACHE_VARIABLE)
    with suppress(OSError, RuntimeError):  # the latter: no home directory
        yield from _own(Path(base) / "tandem" if base else Path.home() / ".cache" / "tandem")
    if aside:
        with suppress(OSError):
            yield from _own(Path(aside))


def _own(directory: Path) -> Iterator[Path]:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022:
        yield directory


def _key(source: Path) -> str:
    headers = sorted(source.parents[1].rglob("*.h"))
    texts = (part for header in headers for part in (header.name.encode(), header.read_bytes()))
    flags = (*map(str.encode, (*FLAGS, *LIBRARIES)), platform.machine().encode(), sys.platform.encode())
    parts = (source.read_bytes(), *texts, *flags)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of CPython's C interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes, _get_buffer.restype = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int), ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = (ctypes.POINTER(_PyBuffer),), None
_SIMPLE, _WRITABLE = 0, 1


class address_of:  # noqa: N801 - used as a function; a generator would cost a frame of a transfer a microsecond more
    """Yield the address of a contiguous buffer; it cannot be released or resized while the block runs.

    Raises BufferError for one that is not contiguous, or read-only where `writable` is asked for.
    """

    __slots__ = ("_buffer", "_flags", "_held", "_shared")

    def __init__(self, buffer: memoryview, *, writable: bool = False) -> None:
        self._buffer, self._flags = buffer, _WRITABLE if writable else _SIMPLE
        self._held: _PyBuffer | None = None
        self._shared: ctypes.c_char | None = None

    def __enter__(self) -> int:
        buffer = self._buffer
        if not buffer.readonly and buffer.c_contiguous and buffer.nbytes:  # the usual case, in a seventh of the time
            self._shared = ctypes.c_char.from_buffer(buffer)
            return ctypes.addressof(self._shared)
        self._held = _PyBuffer()
        _get_buffer(buffer, ctypes.byref(self._held), self._flags)
        return self._held.buf or 0

    def __exit__(self, *_: object) -> None:
        self._shared = None
        if self._held is not None:
            _release_buffer(ctypes.byref(self._held))
