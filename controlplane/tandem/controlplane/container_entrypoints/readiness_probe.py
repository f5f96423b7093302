"""Readiness probe of a container: exits with 0, or with 1 and the reason.

`python -m tandem.controlplane.container_entrypoints.readiness_probe --folder /run/tandem`

A router reports whether some model can be served, which it knows from requests; a worker, whether it has computed. Both
are asked at their own ports, as clients and Kubernetes' probes ask them.
"""

from __future__ import annotations

import argparse
import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 5.0
_OPTIONS = (("grpc.enable_http_proxy", 0),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 or 1, with one line on stdout."""
    found = argparse.ArgumentParser(
        prog="python -m tandem.controlplane.container_entrypoints.readiness_probe", description=__doc__
    )
    found.add_argument("--folder", type=Path, required=True, help="the container's own, as its command has it")
    found.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for an answer")
    wanted = found.parse_args(arguments)
    trouble = probe(wanted.folder, wanted.timeout)
    sys.stdout.write(f"{trouble or 'ready'}\n")
    return 1 if trouble else 0


def probe(folder: Path, timeout_s: float) -> str:
    """Return why the router or the worker with this container folder is not ready; "" if it is."""
    router, worker = folder / "router" / "router.ready.json", folder / "worker" / "worker.json"
    try:
        if router.exists():
            return _ask_router(json.loads(router.read_bytes())["http"], timeout_s)
        if worker.exists():
            config = json.loads(worker.read_bytes())
            return _ask_worker(f"{config['host']}:{config['port']}", timeout_s)
    except (OSError, ValueError, KeyError) as error:
        return f"it does not answer: {error}"
    return f"nothing runs yet in {folder}"


def _ask_router(url: str, timeout_s: float) -> str:
    """Ask the router; OSError if it does not answer."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_own_certificate())
    )
    try:
        with opener.open(f"{url}/readyz", timeout=timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code}: {error.read(1000).decode(errors='replace')}"


def _own_certificate() -> ssl.SSLContext:
    """Skip verification: the probe asks its own router, and the certificate is for a name that clients use."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _ask_worker(address: str, timeout_s: float) -> str:
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            asked = health_pb2.HealthCheckRequest()
            status = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=timeout_s).status
        except grpc.RpcError as error:
            return f"it does not answer: {error.details()}"
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if status == serving else health_pb2.HealthCheckResponse.ServingStatus.Name(status)


if __name__ == "__main__":
    sys.exit(main())
