"""The emulated kubelet and what leads Services to pods, over containers of a few lines: probes, hooks, signals."""

import http.client
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deploy.emulation.node import PREFIX, ROUTER, Cluster, running
from tests.integration.deploy.emulation.resources import CONFIG_MAPS, DEPLOYMENTS, PODS, SERVICES, Object
from tests.integration.deploy.rendering import NAMESPACE
from tools.waiting import wait_for

SERVER = """
import http.server, os, pathlib, signal, sys
here = pathlib.Path("/run/own")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        good = self.path != "/healthz" or not (here / "sick").exists()
        self.send_response(200 if good else 503)
        self.end_headers()
        self.wfile.write(os.environ["POD_NAME"].encode())
    def log_message(self, *words): pass
def leave(*_):
    (here / "told").touch()
    if not (here / "deaf").exists(): os._exit(0)
signal.signal(signal.SIGTERM, leave)
(here / "started").touch()
http.server.ThreadingHTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""
HEALTH = {
    "httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 20, "failureThreshold": 2,
}  # fmt: skip
STARTED = {**HEALTH, "failureThreshold": 1000}
"""It has as long to listen as it takes."""


def container(**changes: Any) -> Object:
    env = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    return {
        "name": "router",
        "image": "none",
        "command": ["python", "-c", "exec(open('/etc/own/server.py').read())", "$(POD_IP)"],
        "env": env,
        "ports": [{"name": "http", "containerPort": 8000}],
        "volumeMounts": [{"name": "own", "mountPath": "/run/own"}, {"name": "program", "mountPath": "/etc/own"}],
        "readinessProbe": HEALTH,
        **changes,
    }


def deployed(cluster: Cluster, replicas: int = 1, grace_s: int = 20, **changes: Any) -> None:
    """A Deployment, a Service and their program, called as those of a release."""
    store, labels = cluster.world.store, {"app": "own"}
    volumes = [{"name": "own", "emptyDir": {}}, {"name": "program", "configMap": {"name": "program"}}]
    pod = {"containers": [container(**changes)], "volumes": volumes, "terminationGracePeriodSeconds": grace_s}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    ports = [{"name": "http", "port": 8000, "targetPort": "http"}]
    about = {"name": ROUTER, "namespace": NAMESPACE}
    store.create(SERVICES, {"metadata": about, "spec": {"selector": labels, "ports": ports}}, "helm")
    store.create(DEPLOYMENTS, {"metadata": about, "spec": spec}, "helm")


def add_program(cluster: Cluster) -> None:
    about = {"name": "program", "namespace": NAMESPACE}
    cluster.world.store.create(CONFIG_MAPS, {"metadata": about, "data": {"server.py": SERVER}}, "helm")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path) as found:
        yield found


def ask(cluster: Cluster) -> str:
    """Through the Service; "" for no answer."""
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def the_pod(cluster: Cluster) -> tuple[str, Path]:
    """Return its name, and the place of its folder /run/own."""
    [name] = wait_for(lambda: [each for each in cluster.names(PREFIX) if each in cluster.kubelet.running])
    place = cluster.kubelet.running[name].container.path("/run/own")
    wait_for(lambda: (place / "started").exists(), what=cluster.logs())
    return name, place


def condition(cluster: Cluster, name: str) -> str:
    return str(cluster.world.store.get(PODS, NAMESPACE, name)["status"]["conditions"][0]["status"])


def test_a_pod_starts_when_what_it_mounts_is_there_and_is_reached_when_it_is_ready(cluster: Cluster) -> None:
    deployed(cluster, 2)
    wait_for(lambda: len(cluster.names(ROUTER)) == 2)
    assert ask(cluster) == ""
    add_program(cluster)
    wait_for(lambda: {ask(cluster) for _ in range(4)} == set(cluster.names(ROUTER)), what=cluster.logs())
    name = cluster.names(ROUTER)[0]
    (cluster.kubelet.running[name].container.path("/run/own") / "sick").touch()
    wait_for(lambda: condition(cluster, name) == "False")
    wait_for(lambda: name not in {ask(cluster) for _ in range(4)})
    assert cluster.kubelet.failures == [], "it is not ready, and lives"


def test_who_does_not_live_is_ended_and_starts_anew_in_the_same_pod(cluster: Cluster) -> None:
    add_program(cluster)
    deployed(cluster, startupProbe=STARTED, livenessProbe=HEALTH)
    name, place = the_pod(cluster)
    wait_for(lambda: condition(cluster, name) == "True")
    (place / "started").unlink()
    (place / "sick").touch()
    wait_for(lambda: (place / "told").exists())
    (place / "sick").unlink()
    wait_for(lambda: (place / "started").exists())
    wait_for(lambda: condition(cluster, name) == "True")
    assert cluster.names(ROUTER) == [name]
    status = cluster.world.store.get(PODS, NAMESPACE, name)["status"]
    assert status["containerStatuses"][0]["restartCount"] == len(cluster.kubelet.failures) == 1


def test_nothing_is_asked_before_the_start_has_succeeded(cluster: Cluster) -> None:
    add_program(cluster)
    started = {"exec": {"command": ["sh", "-c", "test -f /run/own/go"]}, "periodSeconds": 1, "failureThreshold": 1000}
    deployed(cluster, startupProbe=started, livenessProbe={**HEALTH, "failureThreshold": 1})
    name, place = the_pod(cluster)
    (place / "sick").touch()
    wait_for(lambda: condition(cluster, name) == "False")
    assert cluster.kubelet.failures == []
    (place / "sick").unlink()
    (place / "go").touch()
    wait_for(lambda: condition(cluster, name) == "True")


def test_a_pod_that_is_deleted_is_told_by_its_hook_then_by_a_signal(cluster: Cluster) -> None:
    add_program(cluster)
    hook = {"exec": {"command": ["sh", "-c", "test ! -f /run/own/told && touch /run/own/hooked"]}}
    deployed(cluster, lifecycle={"preStop": hook})
    name, place = the_pod(cluster)
    cluster.delete_pod(name)
    wait_for(lambda: name in cluster.kubelet.ends)
    assert (place / "hooked").exists()
    assert (place / "told").exists()
    assert (cluster.kubelet.ends[name].status, cluster.kubelet.ends[name].hook) == (0, 0)
    assert the_pod(cluster)[0] != name, "another one comes in its place"


def test_who_does_not_leave_in_its_grace_is_killed(cluster: Cluster) -> None:
    add_program(cluster)
    deployed(cluster, grace_s=4, lifecycle={"preStop": {"sleep": {"seconds": 3}}})
    name, place = the_pod(cluster)
    (place / "deaf").touch()
    cluster.delete_pod(name)
    wait_for(lambda: name in cluster.kubelet.ends)
    end = cluster.kubelet.ends[name]
    assert (place / "told").exists()
    assert end.status == -signal.SIGKILL
    assert 3.9 < end.took_s < 7, "what the hook took is part of it"
