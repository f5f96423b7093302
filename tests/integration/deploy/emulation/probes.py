"""A kubelet's probes of a container, their times, and the effects of the answers."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.deploy.emulation.containers import Container
from tests.integration.deploy.emulation.resources import Object

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
