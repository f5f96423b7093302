"""Checks by `nvidia-smi` that GPUs are empty before a worker is placed on them: others' leftovers count.

Also the time that launchers wait for that, and their messages meanwhile.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.events import FOR_A_PLACE

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits")
PROCESSES = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20.0
FREE_SHARE = 0.9
"""Of a GPU's memory, at least this much has to be free."""
WAIT_S, LOOK_EVERY_S = 60.0, 1.0
"""The wait for GPUs in use, at most, and the time between checks."""
_TELL_EVERY_S = 10.0


class HeldGpuError(Exception):
    """The memory of a GPU is in use where a worker was to start; the message names the holder and the amount."""


class GpuMemoryWait:
    """One wait for GPUs. `where`: on which machine, for people; "" = on this one."""

    def __init__(self, wait_s: float, *, where: str = "", now_s: Callable[[], float] = time.monotonic) -> None:
        self._wait_s, self._where, self._now_s = wait_s, where, now_s
        self._ends_s = now_s() + wait_s
        self._told, self._told_s = "", 0.0

    def note(self, holds: str) -> str:
        """Return what is to be reported now that `holds` (see `occupied`) stands in the way; "" where nothing new is.

        HeldGpuError when it has been waited for long enough.
        """
        now_s, place = self._now_s(), f"{self._where}, {holds}" if self._where else holds
        if now_s >= self._ends_s:
            raise HeldGpuError(f"it got no place within {self._wait_s:g} s: {place}")
        is_soon = self._told != "" and now_s - self._told_s < _TELL_EVERY_S  # amounts may change all the time
        if holds == self._told or is_soon:
            return ""
        self._told, self._told_s = holds, now_s
        return f"waiting {FOR_A_PLACE}{place}"


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One GPU; memory in MiB, as the driver counts it."""

    index: str
    uuid: str
    used_mib: int
    total_mib: int

    @property
    def is_free(self) -> bool:
        return self.used_mib <= (1 - FREE_SHARE) * self.total_mib


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that holds memory of a GPU, in MiB; None = the driver does not report how much. `gpu`: its uuid."""

    gpu: str
    pid: int
    used_mib: int | None


def parse(listing: str) -> list[GpuMemory]:
    """Parse the response to `_QUERY`; lines that contain no memory figures are left out."""
    found = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[2].isdigit() and fields[3].isdigit():
            found.append(GpuMemory(fields[0], fields[1], int(fields[2]), int(fields[3])))
    return found


def users(listing: str) -> list[GpuUser]:
    """Parse the response to `PROCESSES`; lines that name no process are left out."""
    found = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit():
            found.append(GpuUser(fields[0], int(fields[1]), int(fields[2]) if fields[2].isdigit() else None))
    return found


def occupied(
    gpus: Sequence[str], ask: Callable[[Sequence[str]], str] | None = None, *, only_by_programs: bool = False
) -> str:
    """Return what stands in the way on `gpus` (indices or uuids), such as "GPU 0 has 61440 of 81920 MiB in use (process
    7)".

    "" where nothing does, and where the machine has no such report. `only_by_programs`: a GPU is left out where no
    program that computes is known to hold it; a screen's memory does not go away.
    """
    ask = ask or _ask
    busy = [gpu for gpu in parse(ask(_QUERY)) if {gpu.index, gpu.uuid} & set(gpus) and not gpu.is_free]
    if not busy:
        return ""
    holders = users(ask(PROCESSES))
    said = []
    for gpu in busy:
        pids = ", ".join(str(holder.pid) for holder in holders if holder.gpu == gpu.uuid)
        if only_by_programs and not pids:
            continue
        by = f" (process {pids})" if pids else ""
        said.append(f"GPU {gpu.index} has {gpu.used_mib} of {gpu.total_mib} MiB in use{by}")
    return "; ".join(said)


def can_tell() -> bool:
    """True if this machine has a program that reports on its GPUs."""
    return shutil.which(_QUERY[0]) is not None


def count() -> int:
    """Return how many GPUs this machine has."""
    return len(parse(_ask(_QUERY)))


def _ask(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
