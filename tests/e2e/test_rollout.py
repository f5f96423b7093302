"""`clusterctl rollout` on a cluster of real processes while clients ask: both revisions serve side by side."""

import contextlib
import json
import shutil
import urllib.error
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tandem.clusterctl.schemas.kinds import schema
from tests.chaos.survivors import asks
from tests.cluster_fixture import cluster_fixture
from tests.e2e.under_load import SETTINGS, ConstantLoad, changed, roles, wait_balanced, wait_ended
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

_PATIENCE_S = 60.0


def next_model(folder: Path) -> Path:
    """The same model as far as answers go, with other files: its KV fits to none of the first one."""
    shutil.copytree(MODEL, folder / "next")
    file = folder / "next" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"transformers_version": "next"}))
    return folder / "next"


def revisions(cluster: Cluster) -> Counter[str]:
    """Registered workers by revision."""
    return Counter(row["revision"] for row in cluster.status()["workers"] if row["is_registered"] and "role" in row)


def desired(cluster: Cluster) -> dict[str, Any]:
    return dict(cluster.admin("/admin/v1/desired")["desired"])


def test_all_workers_are_replaced_and_put_back_under_load(tmp_path: Path) -> None:
    with running("--model", str(MODEL), config=SETTINGS) as cluster:
        with ConstantLoad(cluster, asks(20, 160)) as load:
            first = cluster.pids()
            told = changed(cluster, "rollout", "start", "--set", "worker.max_sequences=32")
            name = told["after"]["rollouts"][0]["revision"]
            load.wait_more(6)
            wait_for(lambda: (revisions(cluster), roles(cluster)) == ({name: 2}, {"prefill": 1, "decode": 1}))
            second = cluster.pids()
            assert not set(first) & set(second)
            wait_ended(first, second)
            again = changed(cluster, "rollout", "start", "--set", "worker.max_sequences=32")
            assert not again["is_changed"]
            changed(cluster, "rollout", "undo")
            load.wait_more(6)
            wait_for(lambda: revisions(cluster) == {"initial": 2})
            wait_ended(second, cluster.pids())
        assert load.failures == []
        wait_balanced(cluster, 2)


def test_paused_and_undone_half_way_under_load(tmp_path: Path) -> None:
    with running("--model", str(MODEL), "--prefill", "2", "--decode", "2", config=SETTINGS) as cluster:
        wait_for(lambda: len(cluster.pids()) == 4, what="all workers are connected: it serves with a pair")
        with ConstantLoad(cluster, asks(20, 160)) as load:
            first = cluster.pids()
            _pause_half_way(cluster, next_model(tmp_path))
            load.wait_more(6)
            halves = revisions(cluster)
            assert set(halves) == {"initial", desired(cluster)["rollouts"][0]["revision"]}
            _only_equals_pair(cluster)
            second = cluster.pids()
            code, _, error = cluster.clusterctl("scale", "--decode", "3", "--yes")
            assert (code, "it decides which workers there are" in error) == (5, True), error
            assert not changed(cluster, "rollout", "pause")["is_changed"]
            changed(cluster, "rollout", "undo")
            load.wait_more(6)
            wait_for(lambda: (revisions(cluster), roles(cluster)) == ({"initial": 4}, {"prefill": 2, "decode": 2}))
            third = cluster.pids()
            stayed = {name: pids for name, pids in first.items() if second.get(name) == pids}
            assert {name: third.get(name) for name in stayed} == stayed, "who had not left was left alone"
            wait_ended({**first, **second}, third)
        assert load.failures == []
        wait_balanced(cluster, 4)


def _pause_half_way(cluster: Cluster, model: Path) -> None:
    """Pause the rollout when the first old worker has left the record."""
    members = {member["worker_id"] for member in desired(cluster)["members"]}
    code, _, error = cluster.clusterctl("rollout", "start", "--model-path", str(model), "--yes", "--no-wait")
    assert code == 0, error
    wait_for(lambda: members - {one["worker_id"] for one in desired(cluster)["members"]}, _PATIENCE_S, "one has left")
    wait_for(lambda: _is_paused(cluster), _PATIENCE_S, "it is paused")
    wait_for(lambda: _is_as_recorded(cluster), _PATIENCE_S, "the rollout stands still")


def _is_paused(cluster: Cluster) -> bool:
    """Pause as `rollout pause` does, without the time that a program takes to start; the controller may be faster."""
    wish = {"verb": "rollout", "step": "pause"}
    with contextlib.suppress(urllib.error.HTTPError):
        paused = cluster.admin("/admin/v1/desired/propose", {"wish": wish})["after"]
        cluster.admin("/admin/v1/desired", {"state": paused})
    return bool(desired(cluster)["rollouts"][0]["phase"] == "paused")


def _is_as_recorded(cluster: Cluster) -> bool:
    there = {row["worker"] for row in cluster.status()["workers"] if row["state"] == "ready"}
    return there == {member["worker_id"] for member in desired(cluster)["members"]}


def _only_equals_pair(cluster: Cluster) -> None:
    status = cluster.status()
    of = {row["worker"]: row["revision"] for row in status["workers"]}
    pairs = [(of[pair["prefill"]], of[pair["decode"]]) for pair in status["pairs"]]
    assert {one for one, _ in pairs} == {"initial", *of.values()}
    assert all(one == other for one, other in pairs)
    refused = [pair["why"] for pair in status["refused_pairs"]]
    assert refused
    assert all(why.startswith("revision differs: ") for why in refused)


cluster = cluster_fixture("--model", str(MODEL), config=SETTINGS)


@pytest.mark.parametrize("is_in_the_worker", [True, False])
def test_a_revision_that_does_not_work_stops_by_itself_and_says_why(
    cluster: Cluster, tmp_path: Path, is_in_the_worker: bool
) -> None:
    before, model = cluster.pids(), next_model(tmp_path)
    (model / "config.json").write_text("{}")
    wish = ("--set", "worker.kv_memory_bytes=1KiB") if is_in_the_worker else ("--model-path", str(model))
    code, _, error = cluster.clusterctl("rollout", "start", *wish, "--yes")
    assert code == 2, error
    assert "stopped: " in error
    assert "clusterctl rollout undo" in error
    assert cluster.pids() == before
    code, out, _ = cluster.clusterctl("rollout", "status", "--wait", "-o", "json")
    assert (code, json.loads(out)["items"][0]["phase"]) == (7, "failed")
    assert json.loads(out)["items"][0]["reason"] in error
    assert cluster.clusterctl("rollout", "status")[0] == 7
    kinds = cluster.clusterctl("events", "--last", "100")[1]
    assert "as a worker of it does not work" in kinds
    changed(cluster, "rollout", "undo")
    assert cluster.pids() == before
    code, out, _ = cluster.clusterctl("rollout", "status", "-o", "json")
    assert (code, json.loads(out)["items"][0]["phase"]) == (0, "done")
    errors = list(jsonschema_rs.Draft202012Validator(schema("RolloutList")).iter_errors(json.loads(out)))
    assert errors == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("start",), 2, "no change is given"),
        (("start", "--set", "worker.max_sequences"), 2, "--set is 'worker.max_sequences'"),
        (("start", "--set", "worker.max_sequence=3", "--yes"), 2, "Did you mean worker.max_sequences?"),
        (("start", "--set", "worker.max_sequences=many", "--yes"), 2, "max_sequences"),
        (("start", "--set", "worker.max_sequences=0", "--yes"), 2, "use 1 or more"),
        (("start", "--set", "worker.tp=2", "--yes"), 2, "TP and hardware belong to the pool"),
        (("start", "--revision", "r2", "--max-surge", "0", "--yes"), 2, "--max-surge and --max-unavailable are 0"),
        (
            ("start", "--revision", "r2", "--max-surge", "0", "--max-unavailable", "1", "--yes"),
            5,
            "has to go on serving",
        ),
        (("start", "--revision", "r/2", "--yes"), 5, "cannot name a revision"),
        (("start", "--revision", "r2", "--current-revision", "r1", "--yes"), 5, "the revision is initial and not r1"),
        (("start", "--revision", "r2", "--model", "tandem-tin", "--yes"), 3, "Did you mean tandem-tiny"),
        (("start", "--revision", "r2"), 2, "give --yes"),
        (("pause", "--yes"), 5, "no rollout of tandem-tiny is under way"),
        (("resume", "--yes"), 5, "no rollout of tandem-tiny is under way"),
        (("status", "--model", "tandem-tin"), 3, "there is no model 'tandem-tin'"),
        (("stauts",), 2, "Did you mean 'status'"),
    ],
)
def test_what_may_not_be_is_refused_with_its_own_code(
    cluster: Cluster, arguments: tuple[str, ...], code: int, message: str
) -> None:
    before = desired(cluster)
    found, _, error = cluster.clusterctl("rollout", *arguments)
    assert (found, message.lower() in error.lower()) == (code, True), error
    assert desired(cluster) == before


def test_a_dry_run_shows_what_a_revision_is_and_changes_nothing(cluster: Cluster) -> None:
    before = desired(cluster)
    code, out, _ = cluster.clusterctl(
        "rollout", "start", "--revision", "r2", "--set", "worker.chunk_tokens=64", "--dry-run"
    )
    assert code == 0
    assert "~ tandem-tiny: rollout initial → r2, rolling; at most 1 more of a role" in out
    assert "worker.chunk_tokens = 64" in out
    assert "nothing was changed" in out
    assert desired(cluster) == before
