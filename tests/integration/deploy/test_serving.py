"""The commands of the chart's containers, run here as Kubernetes would run them, are a cluster that serves.

Facts of pods, paths and ports are filled in; Redis is a private one. Nothing is restarted, as no kubelet is here.
"""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.deploy.release_pods import (
    ANSWER_TOKENS,
    PASSWORD,
    Cluster,
    ask,
    clusterctl,
    connected,
    get,
    in_flight,
    new_key,
    reattempts,
)
from tests.integration.deploy.rendering import CHART, Helm
from tools.waiting import wait_for


@pytest.fixture
def cluster(helm: Helm, tmp_path: Path) -> Iterator[Cluster]:
    release = helm.render((CHART / "ci" / "sim.yaml").read_text())
    with PrivateRedis.start(tmp_path / "redis", PASSWORD) as redis:
        found = Cluster(tmp_path, release, redis)
        try:
            yield found
        finally:
            for pod in found.pods.values():
                pod.process.kill()
                pod.process.wait(30)


def test_the_pods_of_a_release_serve_and_leave_without_a_failed_answer(cluster: Cluster) -> None:
    cluster.start("router-a", "router")
    cluster.start("prefill-a", "worker", 1, pool="prefill")
    cluster.start("decode-a", "worker", 2, pool="decode")
    leaving = cluster.start("decode-b", "worker", 3, pool="decode")
    api = cluster.ready("router-a")["http"]
    assert get(f"{api}/livez") == 200, "it lives before anybody can answer"
    wait_for(lambda: get(f"{api}/readyz") == 200, 120, cluster.logs())
    every = {"prefill-a", "decode-a", "decode-b"}
    wait_for(lambda: connected(cluster, "router-a") == every, 120, "it is ready with the first pair")
    key = new_key(cluster, "router-a")
    assert ask(api, "")[0] == 401
    assert ask(api, key)[0] == 200

    answers: list[tuple[int, dict[str, Any]]] = []
    clients = [threading.Thread(target=lambda: answers.append(ask(api, key, ANSWER_TOKENS))) for _ in range(6)]
    for client in clients:
        client.start()
    wait_for(lambda: in_flight(cluster, "router-a", "decode-b") > 0)
    assert leaving.stop() == 0
    for client in clients:
        client.join(60)
    assert [status for status, _ in answers] == [200] * 6, cluster.logs()
    assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {ANSWER_TOKENS}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
    assert reattempts(cluster, "router-a") == 0, "it was drained: each answer ended where it began"

    assert ask(api, key)[0] == 200, "the other one goes on"
    scaled = clusterctl(cluster, "router-a", "scale", "--decode", "3", "--yes")
    assert scaled.returncode != 0, "there is no controller"
    assert [cluster.pods[name].stop() for name in ("decode-a", "prefill-a", "router-a")] == [0, 0, 0]


def test_what_a_container_left_is_gone_when_it_starts_again(cluster: Cluster) -> None:
    """Its pod's folder stays over a restart; no other account can read its contents."""
    pod = cluster.start("decode-a", "worker", pool="decode")
    own = pod.place.folder / "run/tandem/worker"
    wait_for(lambda: (own / "worker.json").exists(), what=cluster.logs())
    assert own.stat().st_mode & 0o777 == 0o700
    assert (own / "worker.json").stat().st_mode & 0o777 == 0o600
    pod.process.kill()
    pod.process.wait(30)
    (own / "stale.sock").touch()
    (own / "worker.json").unlink()
    with (pod.place.folder / "log").open("ab") as log:
        pod.process = subprocess.Popen(pod.place.command(pod.each.command), env=pod.variables, stdout=log, stderr=log)
    wait_for(lambda: (own / "worker.json").exists(), what=cluster.logs())
    assert not (own / "stale.sock").exists()


def test_draining_a_worker_that_does_not_answer_holds_nobody_up(cluster: Cluster) -> None:
    """It has not started, or has ended: a pod that cannot be drained is ended all the same, and at once."""
    pod = cluster.start("decode-a", "worker", pool="decode")
    pod.process.kill()
    pod.process.wait(30)
    hook = pod.place.command(pod.each.spec["lifecycle"]["preStop"]["exec"]["command"])
    done = subprocess.run(hook, env=pod.variables, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert "drain" in done.stderr
