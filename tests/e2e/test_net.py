"""`clusterctl net` on a whole cluster: links measured by one worker serve all, and a forced transport stays."""

import json
from typing import Any

from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

FLAGS = ("--engine", "sim", "--decode", "1", "--disaggregation", "always")


def clusterctl_net(cluster: Cluster, *flags: str) -> str:
    code, out, error = cluster.clusterctl("net", *flags, by_endpoint=True)
    assert code == 0, error
    return out


def net(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(clusterctl_net(cluster, "--json"))
    return found


def serve(cluster: Cluster, requests: int = 6) -> None:
    for number in range(requests):
        cluster.complete(f"{number} " * 100, 5)


def test_the_matrix_and_the_links_of_a_cluster() -> None:
    with running("--prefill", "2", *FLAGS) as cluster:

        def is_measured() -> bool:
            serve(cluster)
            return [link["bytes_per_s"] > 0 for link in net(cluster)["links"]] == [True, True]

        wait_for(is_measured, 60, "both links are reported with what they carried")
        wait_for(lambda: len(net(cluster)["measured"]) == 3, 30, "the measurements came through Redis")
        found = net(cluster)
        assert {worker["role"] for worker in found["workers"]} == {"prefill", "decode"}
        (host,) = {worker["host"] for worker in found["workers"]}
        rows = {row["transport"]: row for row in found["measured"]}
        assert set(rows) == {"shm", "tcp", "grpc"}
        for row in rows.values():
            assert (row["from_host"], row["to_host"], row["failure"]) == (host, host, "")
            assert row["bytes_per_s"] > 1e6
            assert row["latency_s"] > 0
        links = {link["worker"]: link for link in found["links"]}
        assert set(links) == {"prefill-0", "prefill-1"}
        for link in links.values():
            assert (link["peer"], link["rank"], link["peer_rank"]) == ("decode-0", 0, 0)
            assert rows[link["transport"]]["is_used"]
            assert link["bytes_per_s"] > 1e6
            assert "fastest of" in link["reason"]
        page = clusterctl_net(cluster)
        assert "prefill-0.0 → decode-0.0" in page
        assert "GB/s" in page or "MB/s" in page


def test_a_codec_is_used_on_links_that_measured_slow() -> None:
    """Not before: an unmeasured link is not taken for slow."""
    with running("--prefill", "1", "--wire-codec", "int8", "--wire-codec-below", "900GB", *FLAGS) as cluster:
        serve(cluster, 2)
        wait_for(
            lambda: [pair["form"] for pair in cluster.status()["pairs"]] == ["codec int8"], 30, "the router knows it"
        )
        serve(cluster, 2)


def test_a_forced_transport_with_two_ranks_a_worker_is_measured_and_all_its_links_show() -> None:
    with running("--prefill", "1", "--tp", "2", "--transport", "tcp", *FLAGS) as cluster:
        serve(cluster, 2)
        wait_for(lambda: len(net(cluster)["links"]) == 2, 30, "the links of both ranks are reported")
        wait_for(lambda: net(cluster)["measured"], 30, "the measurement came through Redis")
        found = net(cluster)
        assert {row["transport"] for row in found["measured"]} == {"tcp"}
        ends = {(link["rank"], link["peer_rank"], link["transport"], link["reason"]) for link in found["links"]}
        assert ends == {(0, 0, "tcp", "configured"), (1, 1, "tcp", "configured")}
        wait_for(lambda: all(link["bytes_per_s"] > 1e6 for link in net(cluster)["links"]), what="both know its speed")


def test_a_transport_that_is_taken_by_name_alone_needs_the_name_alone() -> None:
    with running("--prefill", "1", "--transport", "gloo", *FLAGS) as cluster:
        serve(cluster, 2)
        wait_for(lambda: net(cluster)["links"], 30, "the link is reported")
        assert {link["transport"] for link in net(cluster)["links"]} == {"gloo"}
        assert {name for worker in cluster.status()["workers"] for name in worker["transports"]} == {"gloo"}
