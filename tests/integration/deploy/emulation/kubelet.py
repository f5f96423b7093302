"""A kubelet: each pod of a cluster is its container's real command as a process, probed, started anew and ended.

A pod that is to end runs its preStop hook, gets SIGTERM, and SIGKILL when its grace is over; a container whose liveness
fails is ended so, too, and starts anew in the same pod.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tandem.core.parent_death_signal import tied
from tests.integration.deploy.emulation.containers import Container, Machine
from tests.integration.deploy.emulation.probes import Probes
from tests.integration.deploy.emulation.resources import PODS, Object, RefusedError
from tests.integration.deploy.emulation.store import Store

_LOOK_S = 0.1
_BACK_OFF_S = (0.2, 1.0, 2.0, 4.0)
"""Ten seconds and more with a real one."""


@dataclass(frozen=True, slots=True)
class End:
    """How a pod ended: its container's exit status (negative: by that signal), whether preStop succeeded, and how
    long it took."""

    status: int
    hook: int
    took_s: float


@dataclass
class Kubelet:
    """The only node of a cluster. `run` it in a thread; when it is asked to stop it kills all that still runs."""

    store: Store
    machine: Machine
    stopping: threading.Event = field(default_factory=threading.Event)
    running: dict[str, Pod] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Containers that ended unasked: (pod, status) in words, with the last of their output."""
    _seen: set[str] = field(default_factory=set)
    _keepers: list[threading.Thread] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def run(self) -> None:
        while not self.stopping.wait(_LOOK_S):
            for pod in self.store.all(PODS):
                if pod["metadata"]["uid"] not in self._seen:
                    self._seen.add(pod["metadata"]["uid"])
                    keeper = threading.Thread(target=self._keep, args=(pod, next(self._numbers)))
                    keeper.start()
                    self._keepers.append(keeper)
        for keeper in self._keepers:
            keeper.join(60)

    def _keep(self, found: Object, number: int) -> None:
        """A pod from its start to its end."""
        pod = Pod(self.store, found, self.machine, number)
        try:
            if not pod.begin(self.stopping):
                return
            self.running[pod.name] = pod
            while not self.stopping.wait(_LOOK_S):
                if pod.is_leaving:
                    self.ends[pod.name] = pod.end()
                    return
                if (status := pod.look()) is not None:
                    self.failures.append(f"{pod.name} ended with {status}:\n{pod.container.log()}")
        finally:
            self.running.pop(pod.name, None)
            pod.kill()


class Pod:
    """A pod on this machine."""

    def __init__(self, store: Store, found: Object, machine: Machine, number: int) -> None:
        self._store, self._found, self._machine = store, found, machine
        self.name = str(found["metadata"]["name"])
        low = os.getpid() % 60_000
        self.ip = f"127.{10 + number % 200}.{1 + low // 250}.{1 + low % 250}"
        self._folder = machine.folder / "pods" / str(number)
        self.container: Container
        self._process: subprocess.Popen[bytes] | None = None
        self._probes: Probes
        self._restarts, self._since_s, self._due_s = 0, 0.0, 0.0

    @property
    def is_leaving(self) -> bool:
        found = self._store.find(PODS, self._found["metadata"]["namespace"], self.name)
        return found is None or "deletionTimestamp" in found["metadata"]

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def begin(self, stopping: threading.Event) -> bool:
        """Start it, once everything that it mounts is there; False when it has to end before."""
        while True:
            if self.is_leaving:
                self._store.delete(PODS, self._found, grace_s=0)
                return False
            try:
                self.container = Container(self._machine, self._found, self.ip, self._folder)
                break
            except RefusedError:
                self._folder = Path(f"{self._folder}-")
                if stopping.wait(1.0):
                    return False
        self._start()
        return True

    def look(self) -> int | None:
        """Probe it, and start it anew where it has ended, or has to. With what status it ended unasked."""
        if self._process is None:
            if time.monotonic() >= self._due_s:
                self._start()
            return None
        if self._process.poll() is not None:
            return self._ended(self._process.returncode)
        self._probes.look()
        if self._probes.is_dead:
            self.end()
            return self._ended(self._process.returncode)
        self._tell(is_ready=self._probes.is_ready)
        return None

    def end(self) -> End:
        """preStop, SIGTERM, and what has not ended in its grace is killed."""
        began_s = time.monotonic()
        ends_s = began_s + int(self._found["spec"].get("terminationGracePeriodSeconds", 30))
        status = hook = 0
        if self._process is not None and self._process.poll() is None:
            hook = self._hook(ends_s)
            self._process.send_signal(signal.SIGTERM)
            try:
                status = self._process.wait(max(1.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                status = self._process.wait(30)
        if self.is_leaving:
            self._store.delete(PODS, self._found, grace_s=0)
        return End(status, hook, time.monotonic() - began_s)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)

    # ---- below -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                tied(self.container.command), env=self.container.variables, stdout=log, stderr=log, cwd=self._folder
            )
        self._probes = Probes(self.container)
        self._tell(is_ready=False)

    def _ended(self, status: int) -> int:
        self._process = None
        self._due_s = time.monotonic() + _BACK_OFF_S[min(self._restarts, len(_BACK_OFF_S) - 1)]
        self._restarts += 1
        self._tell(is_ready=False)
        return status

    def _hook(self, ends_s: float) -> int:
        hook = self.container.spec.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            threading.Event().wait(hook["sleep"]["seconds"])
        if "exec" not in hook:
            return 0
        command = self.container.words(hook["exec"]["command"])
        with (self._folder / "log").open("ab") as log:
            running = subprocess.Popen(command, env=self.container.variables, stdout=log, stderr=log)
        try:
            return running.wait(max(1.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            running.kill()
            return running.wait(30)

    def _tell(self, *, is_ready: bool) -> None:
        """Write its status to the API."""
        since = self._since_s = (self._since_s or time.monotonic()) if is_ready else 0.0
        condition = {"type": "Ready", "status": str(is_ready)}
        started = {"name": self.container.spec["name"], "ready": is_ready, "restartCount": self._restarts}
        status = {
            "phase": "Running",
            "podIP": self.ip,
            "conditions": [condition],
            "containerStatuses": [started],
            "readySince": since,
        }
        try:
            self._store.change(PODS, self._found, lambda live: {**live, "status": status})
        except RefusedError:
            return  # deleted at once by another client
