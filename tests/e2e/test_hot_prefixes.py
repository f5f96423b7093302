"""Common prefixes of many prompts survive the worker that computed them: others fetch them before that one stops."""

import random

from tests.cluster_fixture import cluster_fixture
from tests.e2e.under_load import changed
from tools.running_cluster import Cluster, is_free
from tools.waiting import wait_for

CONFIG = """
[pools]
mixed = 2
[worker]
engine = "sim"
threads = 1
[worker.sim]
prefill_tokens_per_s = 2000.0
"""
SHARED_TOKENS = 960


cluster = cluster_fixture(config=CONFIG)


def held(cluster: Cluster, prompt: list[int]) -> dict[str, int]:
    """Leading tokens of the prompt that each worker holds, by the index."""
    said = cluster.admin("/admin/v1/route/explain", {"prompt": prompt})
    return {row["worker"]: row["held_tokens"] for row in said["workers"]}


def ask(cluster: Cluster, prompt: list[int]) -> int:
    """Return the prompt tokens that were not computed for it."""
    answer = cluster.complete(prompt, 4)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_hot_prefix_is_fetched_before_its_only_holder_stops(cluster: Cluster) -> None:
    rng = random.Random(6)
    shared = [rng.randrange(600, 3600) for _ in range(SHARED_TOKENS)]
    changed(cluster, "drain", "mixed-1")
    for _ in range(4):
        ask(cluster, [*shared, *(rng.randrange(600, 3600) for _ in range(20))])
        wait_for(lambda: held(cluster, shared).get("mixed-0", 0) == SHARED_TOKENS, what="the router knows its blocks")
    changed(cluster, "uncordon", "mixed-1")
    assert held(cluster, shared).get("mixed-1", 0) == 0
    changed(cluster, "drain", "mixed-0")
    saved = [one for one in cluster.admin("/admin/v1/events")["events"] if one["kind"] == "prefixes_saved"]
    assert [one["subject"] for one in saved] == ["mixed-0"]
    assert "1 prefix of it" in saved[0]["reason"]
    assert ask(cluster, [*shared, 700, 701, 702]) == SHARED_TOKENS, "mixed-1 has it"
    changed(cluster, "scale", "--mixed", "1")
    assert [row["worker"] for row in cluster.status()["workers"] if row["is_registered"]] == ["mixed-1"]
    assert ask(cluster, [*shared, 800, 801, 802]) == SHARED_TOKENS
    wait_for(lambda: is_free(cluster, workers=1), what="nothing in flight, nothing held")
