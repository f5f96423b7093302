"""A kubelet: each pod of a cluster is its container's real command as a process, probed, started anew and ended.

A pod that is to end runs its preStop hook, gets SIGTERM, and SIGKILL when its grace is over; a container whose liveness
fails is ended so, too, and starts anew in the same pod."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.core.parent_death_signal import tied
from tests.integration.deploy.emulation.containers import Container, Machine
from tests.integration.deploy.emulation.resources import PODS, Object, RefusedError
from tests.integration.deploy.emulation.store import Store

PACE = 0.2
"""Of a probe's period: five times as often as in the chart, so that tests are short. Counts are the chart's."""


_START_S = 10.0
"""Minimum time of a probe that is a process: it shares two cores with all pods."""


@dataclass
class Probe:
    """One of a container's probes. `is_good`: what its answers came to; None = nothing yet."""

    spec: Object
    losing_pace: float = PACE
    """Fraction of its period that passes between looks at a container that was good and is not."""
    patience: float = 1.0
    """Factor of the chart's failure threshold."""
    is_good: bool | None = None
    _next_s: float = 0.0
    _successes: int = 0
    _failures: int = 0

    def look(self, container: Container) -> None:
        """Ask, if it is time to."""
        if time.monotonic() < self._next_s:
            return
        answer = answers(self.spec, container)
        pace = self.losing_pace if self.is_good and not answer else PACE
        self._next_s = time.monotonic() + pace * self.spec.get("periodSeconds", 10)
        self._successes, self._failures = (self._successes + 1, 0) if answer else (0, self._failures + 1)
        if self._successes >= self.spec.get("successThreshold", 1):
            self.is_good = True
        if self._failures >= self.patience * self.spec.get("failureThreshold", 3):
            self.is_good = False


@dataclass
class Probes:
    """All three of one run of a container."""

    container: Container
    startup: Probe | None = field(init=False)
    readiness: Probe | None = field(init=False)
    liveness: Probe | None = field(init=False)

    def __post_init__(self) -> None:
        spec = self.container.spec
        startup, readiness, liveness = (spec.get(kind) for kind in _KINDS)
        # Processes start no faster than in a cluster: they have as long as in the chart, with more looks in it.
        self.startup = Probe(startup, patience=1.0 / PACE) if startup else None
        # Whole periods, for the same reason: what waits for processes that start may not be ready so long.
        self.readiness = Probe(readiness, losing_pace=1.0) if readiness else None
        self.liveness = Probe(liveness) if liveness else None

    def look(self) -> None:
        """The first one alone until it has succeeded."""
        if self.startup is not None and not self.startup.is_good:
            self.startup.look(self.container)
            return
        for probe in (self.readiness, self.liveness):
            if probe is not None:
                probe.look(self.container)

    @property
    def is_started(self) -> bool:
        return self.startup is None or self.startup.is_good is True

    @property
    def is_ready(self) -> bool:
        return self.is_started and (self.readiness is None or self.readiness.is_good is True)

    @property
    def is_dead(self) -> bool:
        """True if the container has to start anew."""
        return any(probe is not None and probe.is_good is False for probe in (self.startup, self.liveness))


_KINDS = ("startupProbe", "readinessProbe", "livenessProbe")


def answers(spec: Object, container: Container) -> bool:
    """True if it is answered well, in time."""
    timeout_s = float(spec.get("timeoutSeconds", 1))
    if "grpc" in spec:
        asked = spec["grpc"]
        return _serves(f"{container.ip}:{asked['port']}", asked.get("service", ""), timeout_s)
    if "httpGet" in spec:
        about = spec["httpGet"]
        url = f"{about.get('scheme', 'HTTP').lower()}://{container.ip}:{container.port(about['port'])}{about['path']}"
        return _is_good(url, timeout_s)
    if "tcpSocket" in spec:
        try:
            with socket.create_connection((container.ip, container.port(spec["tcpSocket"]["port"])), timeout_s):
                return True
        except OSError:
            return False
    command = container.words(spec["exec"]["command"])
    timeout_s = max(timeout_s, _START_S)
    try:
        done = subprocess.run(command, env=container.variables, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _serves(address: str, service: str, timeout_s: float) -> bool:
    try:
        with grpc.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.RpcError:
        return False


def _is_good(url: str, timeout_s: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return 200 <= int(response.status) < 400
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


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
