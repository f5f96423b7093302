"""Machines made of one: a network namespace each, a wire from the first to every other one that can be cut, a
`/dev/shm` and a runtime folder that no other sees. Needs root, `ip` and `unshare`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.waiting import wait_for

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_VIEW = """
set -e
if [ -n "$1" ]; then hostname "$1"; fi
mount --bind "$2/shm" /dev/shm
mount --bind "$2/run" "$3"
export XDG_RUNTIME_DIR="$3" TANDEM_STATE_DIR="$2/state"
shift 3
exec "$@"
"""


class NoNamespacesError(Exception):
    """This machine, or this user, cannot have them; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`folder` has what only this machine sees: `shm` is its /dev/shm, `run` its runtime folder, `state` its state.

    `name` "" = it has the name of the machine that it is made of, as containers on a host's network have. `device`: its
    end of the wire; of the first machine, that of the first wire.
    """

    namespace: str
    address: str
    folder: Path
    name: str = ""
    device: str = "veth0"

    def command(self, *words: str) -> list[str]:
        """`words` as a command that runs on this machine, in the process that is started."""
        run = self.folder.parent / "run"
        view = ["sh", "-c", _VIEW, "sh", self.name, str(self.folder), str(run)]
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", *view, *words]

    def processes(self) -> dict[int, str]:
        """Every process of this machine with its command line, except the calling one."""
        there = (_NAMESPACES / self.namespace).stat().st_ino
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and (entry / "ns" / "net").stat().st_ino == there:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = words.decode(errors="replace")
            except OSError:
                continue
        return found

    def kill(self) -> None:
        """Send SIGKILL to all of its processes, until none is left."""

        def is_empty() -> bool:
            for pid in (left := self.processes()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_for(is_empty, what=f"nothing runs on {self.address}")

    def cut(self, is_cut: bool = True) -> None:
        """Take its wire out, or put it in again: nothing arrives, and no end is notified."""
        _do("ip", "-n", self.namespace, "link", "set", self.device, "down" if is_cut else "up")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Enter the machine's network with this thread and the threads and processes that it starts meanwhile."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(_NAMESPACES / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(there)
            os.close(before)


@contextlib.contextmanager
def machines(folder: Path, addresses: Sequence[str], names: Sequence[str] = ()) -> Iterator[tuple[Machine, ...]]:
    """Machines of these addresses, the first wired to each other one; `folder` is an empty one with a short path.

    Processes that run on them when the block ends are killed. NoNamespacesError where there can be none.
    """
    made: list[Machine] = []
    with contextlib.ExitStack() as stack:
        (folder / "run").mkdir()
        for number, address in enumerate(addresses):
            own = folder / f"m{number}"
            for part in ("shm", "run", "state"):
                (own / part).mkdir(parents=True, mode=0o700)
            machine = Machine(f"td-{os.getpid()}-{number}", address, own, names[number] if names else "")
            _make(machine)
            stack.callback(_remove, machine)
            made.append(machine)
        for number, machine in enumerate(made[1:]):
            try:
                _wire(made[0], f"veth{number}", machine)
            except subprocess.CalledProcessError as error:
                raise NoNamespacesError(_reason(error)) from error
        yield tuple(made)


def look_for_namespaces() -> None:
    """Make two machines and take them away again. NoNamespacesError where there can be none."""
    with tempfile.TemporaryDirectory(prefix="td-n-") as folder, machines(Path(folder), ("10.203.79.1", "10.203.79.2")):
        pass


def _remove(machine: Machine) -> None:
    try:
        machine.kill()
    finally:
        subprocess.run(["ip", "netns", "del", machine.namespace], check=False)


def _make(machine: Machine) -> None:
    try:
        _do("ip", "netns", "add", machine.namespace)
        _do("ip", "-n", machine.namespace, "link", "set", "lo", "up")
        _do(*machine.command(sys.executable, "-c", ""))
    except (OSError, subprocess.CalledProcessError) as error:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", machine.namespace], check=False, capture_output=True)
        raise NoNamespacesError(_reason(error)) from error


def _wire(first: Machine, device: str, other: Machine) -> None:
    ends = (first.namespace, device, first.address), (other.namespace, other.device, other.address)
    _do("ip", "link", "add", device, "netns", ends[0][0], "type", "veth",
        "peer", "name", other.device, "netns", ends[1][0])  # fmt: skip
    for (namespace, name, address), (_, _, peer) in zip(ends, reversed(ends), strict=True):
        _do("ip", "-n", namespace, "address", "add", address, "peer", peer, "dev", name)
        _do("ip", "-n", namespace, "link", "set", name, "up")


def _reason(error: Exception) -> str:
    said: bytes = getattr(error, "stderr", b"") or str(error).encode()
    return said.decode(errors="replace").strip()


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
