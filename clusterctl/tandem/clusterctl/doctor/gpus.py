"""Checks of this machine's GPUs: which processes hold their memory, and whether ranks can use NCCL between them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.clusterctl.doctor.findings import Check, Finding, error, ok, size, skipped, warning
from tandem.controlplane.gpu_free_check import PROCESSES, GpuUser, users
from tandem.controlplane.worker_settings import effective
from tandem.core.config import ClusterConfig
from tandem.core.errors import ConfigError
from tandem.core.state_enums import RoleName

_TIMEOUT_S = 20.0
_NCCL_SHARED_BYTES = 1 << 30
"""The size with which NVIDIA's containers are to be started."""
_RANK = "tandem.worker.rank"
_SLOWER = {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC", "NCCL_SHM_DISABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """`config`: the workers' configuration; raises ConfigError for a wrong one. `variables` are the environment's,
    which workers inherit."""

    variables: Mapping[str, str]
    config: Callable[[], ClusterConfig]
    shared_memory: Path = Path("/dev/shm")  # noqa: S108 - it is only read, never written

    def checks(self) -> Sequence[tuple[str, Check]]:
        return (("gpu-memory", self.memory), ("nccl", self.nccl))

    def memory(self) -> Iterator[Finding]:
        """Check for GPU memory that a dead worker left in use: the next worker lacks it."""
        program = self._nvidia_smi()
        if program is None:
            yield skipped("there is no nvidia-smi, and so no GPU, here")
            return
        try:
            done = subprocess.run(
                [program, *PROCESSES[1:]], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            yield error(f"nvidia-smi does not answer for {_TIMEOUT_S:g} s", "look at `dmesg`, or reboot")
            return
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split()) or f"it ended with {done.returncode}"
            yield error(f"nvidia-smi fails: {said[:200]}", "make the driver work, or reboot")
            return
        found = users(done.stdout)
        trouble = [finding for user in found if (finding := _stranger(user)) is not None]
        yield from trouble
        if not trouble:
            yield ok(f"held by {len(found)} processes, all of them workers' ranks")

    def nccl(self) -> Iterator[Finding]:
        """Check NCCL where it is used: its own symptoms are a time-out, or nothing but a slow sum."""
        try:
            config = self.config()
        except ConfigError:
            yield skipped("the configuration is wrong")
            return
        sections = [effective(config, role) for role in RoleName]
        tp = max((s.tp for s in sections if s.device != "cpu" and s.engine == "model"), default=1)
        is_linked = any("nccl" in (s.transport, *s.transports) for s in sections)
        if self._nvidia_smi() is None or (tp == 1 and not is_linked):
            yield skipped("no worker here uses it: no GPU, or neither --tp above 1 nor --transport nccl")
            return
        trouble = [*self._interfaces(), *(self._between_ranks(tp) if tp > 1 else ())]
        yield from trouble
        if not trouble:
            yield ok("its settings fit this machine")

    def _interfaces(self) -> Iterator[Finding]:
        wanted = self.variables.get("NCCL_SOCKET_IFNAME", "")
        if not wanted:
            return
        here = [name for _, name in socket.if_nameindex()]
        chosen = matching(wanted, here)
        if not chosen:
            what = f"NCCL_SOCKET_IFNAME is {wanted}, and no interface is left by that ({', '.join(here)} are here)"
            yield error(what, "name one of these, or unset it: NCCL finds one by itself")
        elif all(name == "lo" for name in chosen):
            what = f"NCCL_SOCKET_IFNAME is {wanted}: lo reaches no other machine"
            yield warning(what, "name the interface that other machines reach, or unset it")

    def _between_ranks(self, tp: int) -> Iterator[Finding]:
        """Check the requirements of a group of several ranks on this machine."""
        if self.shared_memory.is_dir():
            found = os.statvfs(self.shared_memory)
            if (room := found.f_blocks * found.f_frsize) < _NCCL_SHARED_BYTES:
                what = f"{self.shared_memory} holds {size(room)}, and NCCL between {tp} ranks may want {size(1 << 30)}"
                fix = f"`mount -o remount,size=1G {self.shared_memory}`, or --shm-size=1g of the container"
                yield warning(what, fix)
        for name, value in _SLOWER.items():
            if self.variables.get(name, "").upper() == value:
                what = f"{name}={value}: the {tp} ranks of a worker do not add up over the fastest way between them"
                yield warning(what, f"unset {name}, unless GPUs of this machine cannot reach each other")

    def _nvidia_smi(self) -> str | None:
        return shutil.which("nvidia-smi", path=self.variables.get("PATH", os.defpath))


def matching(wanted: str, interfaces: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME leaves: names begin with one of a list, `=` they are one of it, `^`
    none of it."""
    is_without = wanted.startswith("^")
    rest = wanted[is_without:]
    is_exact = rest.startswith("=")
    names = [name.partition(":")[0] for name in rest[is_exact:].split(",") if name]

    def is_named(interface: str) -> bool:
        return any(interface == name if is_exact else interface.startswith(name) for name in names)

    return [interface for interface in interfaces if is_named(interface) is not is_without]


def _stranger(user: GpuUser) -> Finding | None:
    """Return the problem with the process that holds this memory; None = it is a rank of a live worker."""
    holds = f"{user.used_mib} MiB of {user.gpu}" if user.used_mib is not None else f"memory of {user.gpu}"
    folder = Path(f"/proc/{user.pid}")
    try:
        arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    except OSError:
        what = f"process {user.pid} holds {holds}, and cannot be seen here: it is in another container, or has ended"
        return warning(what, "end that container; `nvidia-smi --gpu-reset` frees what no process holds")
    if _RANK not in arguments:
        what = f"process {user.pid} ({fields['Name'].strip()}) holds {holds}, and is no worker"
        return warning(what, "end it, or leave it that GPU: CUDA_VISIBLE_DEVICES names the others")
    if f"--parent={fields['PPid'].strip()}" in arguments:
        return None
    what = f"process {user.pid} was a rank of a worker that is gone, and holds {holds}"
    return error(what, f"`kill -9 {user.pid}`; if it stays, the driver has it: reset the GPU, or reboot")
