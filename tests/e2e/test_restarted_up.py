"""`up` is killed, and the same command is given again: what operators changed goes on from where it stood."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.under_load import SETTINGS, changed, roles
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, is_alive, kill, started
from tools.waiting import wait_for

PATIENCE_S = 60.0


@contextmanager
def again(folder: Path, *flags: str) -> Iterator[Cluster]:
    """The same command every time, over the same state."""
    with started("--model", str(MODEL), *flags, folder=folder, config=SETTINGS) as cluster:
        yield cluster


def kill_up(cluster: Cluster) -> None:
    """kill -9 of `up`; everything that it ran ends with it."""
    pids = [pid for group in cluster.pids().values() for pid in group]
    kill(cluster.process.pid)
    assert cluster.process.wait(60) == -signal.SIGKILL
    wait_for(lambda: not any(map(is_alive, pids)), PATIENCE_S, "its workers have ended")


def desired(cluster: Cluster) -> dict[str, Any]:
    return dict(cluster.admin("/admin/v1/desired")["desired"])


def told(cluster: Cluster, kind: str) -> list[str]:
    """Reasons of all events of that kind, oldest first."""
    code, out, _ = cluster.clusterctl("events", "--last", "500", "-o", "json")
    assert code == 0
    return [row["reason"] for row in map(json.loads, out.splitlines()) if row["event"] == kind]


def ready(cluster: Cluster) -> dict[str, str]:
    """Worker → role of those that serve."""
    return {row["worker"]: row["role"] for row in cluster.status()["workers"] if row["state"] == "ready"}


def test_a_scale_outlives_the_controller_and_no_worker_is_lost(tmp_path: Path) -> None:
    with again(tmp_path) as cluster:
        changed(cluster, "scale", "--prefill", "2")
        changed(cluster, "flip", "prefill-1", "--to", "decode")
        changed(cluster, "scale", "--prefill", "2")
        before = desired(cluster)
        kill_up(cluster)
    with again(tmp_path) as cluster:
        assert desired(cluster) == before, "to the version"
        wanted = {member["worker_id"]: member["role"] for member in before["members"]}
        wait_for(lambda: ready(cluster) == wanted, PATIENCE_S, "all of them serve")
        assert roles(cluster) == {"prefill": 2, "decode": 2}
        (kept,) = told(cluster, "desired_kept")
        assert "prefill 1 → 2, decode 1 → 2" in kept
        assert kept in cluster.output.replace("\n", " ")
        kill_up(cluster)
    with again(tmp_path, "--as-configured") as cluster:
        assert roles(cluster) == {"prefill": 1, "decode": 1}
        assert "`--as-configured` was given" in told(cluster, "desired_replaced")[-1]


def test_half_a_rollout_goes_on(tmp_path: Path) -> None:
    with again(tmp_path, "--prefill", "2", "--decode", "2") as cluster:
        first = {member["worker_id"] for member in desired(cluster)["members"]}
        code, _, error = cluster.clusterctl(
            "rollout", "start", "--set", "worker.max_sequences=32", "--yes", "--no-wait"
        )
        assert code == 0, error
        wait_for(lambda: first - {m["worker_id"] for m in desired(cluster)["members"]}, PATIENCE_S, "one is to leave")
        (rollout,) = desired(cluster)["rollouts"]
        assert rollout["phase"] == "rolling"
        kill_up(cluster)
    with again(tmp_path, "--prefill", "2", "--decode", "2") as cluster:
        assert any(rollout["revision"] in reason for reason in told(cluster, "desired_kept"))
        wait_for(lambda: desired(cluster)["rollouts"][0]["phase"] == "done", PATIENCE_S, "the rollout is done")
        found = desired(cluster)
        wait_for(
            lambda: set(ready(cluster)) == {member["worker_id"] for member in found["members"]}, PATIENCE_S, "all serve"
        )
        revisions = {row["revision"] for row in cluster.status()["workers"] if row["state"] == "ready"}
        assert (revisions, roles(cluster)) == ({rollout["revision"]}, {"prefill": 2, "decode": 2})
        kill_up(cluster)


def test_a_signal_ends_the_process_and_down_ends_the_cluster(tmp_path: Path) -> None:
    with again(tmp_path) as cluster:
        changed(cluster, "scale", "--decode", "2")
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(60) == 0
    with again(tmp_path) as cluster:
        wait_for(lambda: roles(cluster) == {"prefill": 1, "decode": 2}, PATIENCE_S, "it is as before")
        code, _, error = cluster.clusterctl("down", "--yes")
        assert code == 0, error
        assert cluster.process.wait(60) == 0
    with again(tmp_path) as cluster:
        assert roles(cluster) == {"prefill": 1, "decode": 1}
        assert "`down` had ended the cluster" in told(cluster, "desired_replaced")[-1]
        kill_up(cluster)
