"""`clusterctl` changes a cluster of real processes while clients ask: no client notices, and nothing is left behind."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.survivors import asks
from tests.cluster_fixture import cluster_fixture
from tests.e2e.under_load import SETTINGS, ConstantLoad, changed, roles, wait_balanced, wait_ended
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

CONFIG = "max_ranks = 7\n" + SETTINGS
cluster = cluster_fixture("--model", str(MODEL), config=CONFIG)


def test_one_pair_becomes_two_and_four_and_three_and_one_under_load() -> None:
    with running("--model", str(MODEL), config=CONFIG) as cluster:
        _change_under_load(cluster)


def _change_under_load(cluster: Cluster) -> None:
    with ConstantLoad(cluster, asks(24, 200)) as load:
        first = cluster.pids()
        changed(cluster, "scale", "--prefill", "2", "--decode", "4")
        wait_for(lambda: roles(cluster) == {"prefill": 2, "decode": 4} and len(cluster.pids()) == 6)
        assert {name: cluster.pids()[name] for name in first} == first, "nobody was started anew"
        load.wait_more(6)
        wide = cluster.pids()
        told = changed(cluster, "scale", "--ratio", "3:1", "--total", "4")
        load.wait_more(6)
        wait_for(lambda: roles(cluster) == {"prefill": 3, "decode": 1} and len(cluster.pids()) == 4)
        narrow = cluster.pids()
        stopped = {row["worker_id"] for row in told["changes"] if row["deed"] == "stop"}
        assert set(wide) - set(narrow) == stopped, "exactly those left that were shown"
        wait_ended(wide, narrow)
        changed(cluster, "scale", "--prefill", "1", "--decode", "1")
        load.wait_more(3)
        wait_ended(narrow, cluster.pids())
    assert load.failures == []
    wait_balanced(cluster, 2)


def test_a_dry_run_shows_and_changes_nothing(cluster: Cluster) -> None:
    before = cluster.admin("/admin/v1/desired")
    code, out, _ = cluster.clusterctl("scale", "--decode", "3", "--dry-run")
    assert code == 0
    assert "+ decode-1: start (as decode in decode)" in out
    assert "nothing was changed" in out
    assert cluster.admin("/admin/v1/desired") == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("scale", "--decode", "2", "--current-decode", "9", "--yes"), 5, "1 decode workers wanted now and not 9"),
        (("scale", "--decode", "0", "--yes"), 5, "1 prefill and 0 decode workers cannot serve"),
        (("scale", "--decode", "9", "--yes"), 5, "max_ranks is 7"),
        (("drain", "prefill-0", "--yes"), 5, "1 of them drained, cannot serve"),
        (("restart", "decode-0", "--yes"), 5, "no other worker could do what a decode worker does"),
        (("flip", "decode-7", "--to", "prefill", "--yes"), 3, "Did you mean decode-0"),
        (("describe", "decod-0"), 3, "Did you mean 'decode-0'"),
        (("scale", "--ratio", "3", "--yes"), 2, "--ratio is '3'"),
        (("scale",), 2, "number of workers is not given"),
        (("scale", "--decode", "2"), 2, "give --yes"),
    ],
)
def test_what_may_not_be_is_refused_with_its_own_code(
    cluster: Cluster, arguments: tuple[str, ...], code: int, message: str
) -> None:
    before = cluster.admin("/admin/v1/desired")
    found, _, error = cluster.clusterctl(*arguments)
    assert (found, message in error) == (code, True), error
    assert cluster.admin("/admin/v1/desired") == before


def test_of_two_operators_one_wins_and_the_other_is_told(cluster: Cluster) -> None:
    """Both have looked at the same version; they write at the same time."""
    proposals = [_post(cluster, "/propose", {"wish": _scale(2)})[1], _post(cluster, "/propose", {"wish": _scale(3)})[1]]
    answers: dict[int, tuple[int, dict[str, Any]]] = {}

    def write(number: int) -> None:
        answers[number] = _post(cluster, "", {"state": proposals[number]["after"]})

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(status for status, _ in answers.values()) == [200, 409]
    won = next(number for number, (status, _) in answers.items() if status == 200)
    lost = answers[1 - won][1]["error"]
    assert lost["code"] == "conflict"
    assert "another client changed the desired state" in lost["message"]
    assert cluster.admin("/admin/v1/desired")["desired"] == proposals[won]["after"]
    assert _post(cluster, "", {"state": proposals[won]["after"]})[0] == 200, "the same again, as after a lost answer"
    changed(cluster, "scale", "--decode", "1")


def test_what_happened_is_told_with_its_reason(cluster: Cluster) -> None:
    came = changed(cluster, "scale", "--decode", "2")["changes"][0]["worker_id"]
    went = changed(cluster, "scale", "--decode", "1")["changes"][0]["worker_id"]
    code, out, _ = cluster.clusterctl("events", "--last", "500", "-o", "json")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    kinds = [(row["event"], row["subject"]) for row in rows]
    expected = [("started", came), ("ready", came), ("draining", went), ("stopping", went), ("exited", went)]
    assert set(expected) <= set(kinds)
    assert all(row["reason"] and row["apiVersion"] for row in rows)
    assert [float(row["time_s"]) for row in rows] == sorted(float(row["time_s"]) for row in rows)


def test_pools_and_workers_are_listed_and_described(cluster: Cluster) -> None:
    pools = json.loads(cluster.clusterctl("get", "pools", "-o", "json")[1])["items"]
    assert [(pool["name"], pool["count"], pool["ready"]) for pool in pools] == [
        ("prefill", 1, 1), ("decode", 1, 1), ("mixed", 0, 0),
    ]  # fmt: skip
    workers = json.loads(cluster.clusterctl("get", "workers", "-o", "json")[1])["items"]
    assert [(row["state"], row["role"], row["wanted_role"]) for row in workers] == [
        ("ready", "decode", "decode"), ("ready", "prefill", "prefill"),
    ]  # fmt: skip
    name = workers[0]["worker"]
    assert "prefill-0" in cluster.clusterctl("get", "workers")[1]
    one = json.loads(cluster.clusterctl("describe", name, "-o", "json")[1])
    assert (one["worker"], one["said"]["tp"]) == (name, 1)
    assert "ready" in [event["event"] for event in one["events"]]


def _scale(decode: int) -> dict[str, Any]:
    return {"verb": "scale", "counts": {"decode": decode}}


def _post(cluster: Cluster, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    key = Path(cluster.context["admin_key_file"]).read_text().strip()
    request = urllib.request.Request(
        f"{cluster.context['admin']}/admin/v1/desired{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
