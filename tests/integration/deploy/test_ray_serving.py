"""The containers beside Ray's head in the chart's RayCluster, run here beside a head as KubeRay would have made it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.controlplane.kuberay_autoscaler.raycluster import CLUSTER, GROUP, NODE_TYPE
from tandem.controlplane.ray.head_process import usable_port
from tandem.controlplane.ray.ray_start import NodeConfig
from tandem.core import config_loader
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.deploy import emulated
from tests.integration.deploy.mounting import Mounted, mounted
from tests.integration.deploy.rendering import CHART, Container, Helm, Release
from tools.waiting import wait_for

PASSWORD = "redis-password of thirty-two bytes!"
SIM = """
config: {worker: {engine: sim}}
poolDefaults: {startupSeconds: 60, resources: {requests: {cpu: "1", memory: 1Gi}, limits: {memory: 1Gi}}}
"""


@pytest.fixture
def release(helm: Helm) -> Release:
    values = (CHART / "ci" / "ray.yaml").read_text()
    kept = values[: values.index("config:")].replace("ray-token}}", "ray-token}, scaling: {enabled: true}}")
    return helm.render(kept + SIM)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(address, token file) of a Ray that is run outside the release."""
    token = tmp_path / "ray-token"
    token.write_text("a token that is as long as Ray's own are, or longer")
    port = usable_port(0)
    config = NodeConfig(port=port, cpus=4, token_file=str(token), cluster="theirs", state_root=str(tmp_path / "theirs"))
    path = tmp_path / "node.json"
    path.write_bytes(config_loader.dump(config))
    said = tmp_path / "node.out"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem.controlplane.ray.ray_start", "--config", str(path)],
            stdout=output,
            stderr=output,
        )
    try:
        wait_for(lambda: "started" in said.read_text() or process.poll() is not None, 90, "the head starts, or ends")
        [started] = [json.loads(line)["started"] for line in said.read_text().splitlines() if '"started"' in line]
        yield started, token
    finally:
        process.terminate()
        assert process.wait(60) == 0


def made(release: Release, address: str) -> emulated.Cluster:
    """Return its RayCluster on an emulated Kubernetes, with two nodes; Ray knows one, with room for all workers."""
    world = emulated.Cluster()
    [cluster] = release.of("RayCluster")
    world.put_raycluster(cluster)
    for group, ip in (("prefill", address), ("decode", "192.0.2.7")):
        labels = {CLUSTER: cluster["metadata"]["name"], GROUP: group, NODE_TYPE: "worker"}
        world.add_pod(f"ray-{group}-1", labels, {"phase": "Running", "podIP": ip})
    return world


def moved(place: Mounted, redis: PrivateRedis, release: Release, kubernetes: str) -> None:
    """The configuration for this machine: another Redis, another Kubernetes, and free ports."""
    path = place.folder / "etc/tandem/config/up.toml"
    text = path.read_text().replace(f"{release.prefix}-redis.serving.svc:6379", f"127.0.0.1:{redis.port}")
    text = text.replace('host = "0.0.0.0"', 'host = "127.0.0.1"')
    account = "/etc/tandem/kubernetes"
    text = text.replace(f'account = "{account}"', f'account = "{place.here(account)}"\napi = "{kubernetes}"')
    for port in (8000, 8001, 8002):
        text = text.replace(f"port = {port}\n", "port = 0\n")
    path.write_text(text)


def clusterctl(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tandem.clusterctl", *words, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_up_places_workers_scales_them_and_names_the_node_that_nobody_is_on(
    release: Release, head: tuple[str, Path], tmp_path: Path
) -> None:
    address, token = head
    [each] = [found for found in release.containers() if found.name == "up"]
    place = mounted(tmp_path / "pod", release, {"POD_NAME": "head-a", "POD_IP": address.partition(":")[0]})
    (place.folder / "etc/tandem/secrets/ray-token").write_bytes(token.read_bytes())
    command = [word.replace(":6379", f":{address.rpartition(':')[2]}") for word in place.command(each.command)]
    world = made(release, address.partition(":")[0])
    with PrivateRedis.start(tmp_path / "redis", PASSWORD) as redis, emulated.serving(world) as kubernetes:
        moved(place, redis, release, kubernetes)
        log = place.folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=place.variables(each), stdout=output, stderr=output)
        try:
            _serves(place, process, log)
            _names_the_node_that_nobody_is_on(world, log)
            _scales(each, place, process, log)
        finally:
            process.kill()
            process.wait(30)


def _serves(place: Mounted, process: subprocess.Popen[bytes], log: Path) -> None:
    wait_for(lambda: "API    http" in log.read_text() or process.poll() is not None, 180, "it serves")
    assert process.poll() is None, log.read_text()


def _names_the_node_that_nobody_is_on(world: emulated.Cluster, log: Path) -> None:
    """Check that it alone is named, in any write: on a slow machine one that resizes another group may come before."""
    wait_for(lambda: _named(world), 60, log.read_text())
    assert {name for name, _ in world.writes} == {*world.rayclusters}
    assert _named(world) == {("decode", "ray-decode-1")}
    wait_for(lambda: "without ray-decode-1" in log.read_text())


def _named(world: emulated.Cluster) -> set[tuple[str, str]]:
    """(group, node) of all that writes asked to delete."""
    found, group = set(), ""
    for _, patch in world.writes:
        for operation in json.loads(patch):
            field = operation["path"].rpartition("/")[2]
            if field == "groupName":
                group = operation["value"]
            elif field == "scaleStrategy":
                found |= {(group, node) for node in operation["value"]["workersToDelete"]}
    return found


def _scales(each: Container, place: Mounted, process: subprocess.Popen[bytes], log: Path) -> None:
    state = place.folder / "run/tandem/up/demo"
    secrets = place.folder / "etc/tandem/secrets"
    assert (state / "secret").read_bytes() == (secrets / "cluster-secret").read_bytes(), "none of its own"
    context = json.loads((state / "context.json").read_text())
    reached = ("--endpoint", context["admin"], "--admin-key-file", str(secrets / "admin-key"))
    assert {worker["role"] for worker in clusterctl("status", *reached)["workers"]} == {"prefill", "decode"}
    clusterctl("scale", "--decode", "2", "--yes", *reached)
    roles = [worker["role"] for worker in clusterctl("status", *reached)["workers"]]
    assert sorted(roles) == ["decode", "decode", "prefill"]
    assert PASSWORD not in " ".join(each.command)
    process.terminate()
    assert process.wait(90) == 0, log.read_text()
