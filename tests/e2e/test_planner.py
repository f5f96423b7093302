"""The planner in a running cluster of real processes: in `act` it flips a worker under load and no request fails; in
`advise` it reports so and changes nothing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.streams import Client, load, prompt, wait_for_answers
from tests.e2e.under_load import roles, wait_balanced
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

SETTINGS = """
max_ranks = 3
[pools]
prefill = 1
decode = 2
[worker]
engine = "sim"
threads = 1
[worker.sim]
prefill_tokens_per_s = 2000.0
decode_step_s = 0.005
[router]
disaggregation = "always"
[slo.chat]
ttft_s = 0.42
[admission]
default_slo = "chat"
[planner]
mode = "MODE"
interval_s = 0.5
window_s = 20.0
min_requests = 10
worth_s = 0.3
cool_down_s = 5.0
"""
"""A prompt takes 0.4 s, and six clients ask all the time: one prefill worker is not enough. No request is refused, as
the time of a prompt by itself is nearly all that is promised."""
PROMPT_TOKENS = 800
PLAN_S = 120.0


@contextmanager
def started(mode: str) -> Iterator[Cluster]:
    """Workers have measured how fast they are, so that no request is refused by a guess."""
    with running("--model", str(MODEL), config=SETTINGS.replace("MODE", mode)) as cluster:
        for number in range(3):
            Client(cluster.context["grpc"], prompt(90_000 + number, PROMPT_TOKENS), 4).check()
        wait_for(lambda: len(cluster.pids()) == 3, what="all workers are connected: it serves with a pair")
        yield cluster


@contextmanager
def asked(cluster: Cluster) -> Iterator[list[Client]]:
    with load(cluster, streams=6, prompt_tokens=PROMPT_TOKENS, shortest=4) as clients:
        yield clients


def wait_told(cluster: Cluster, kind: str) -> str:
    """Return the text of the first event of a kind."""
    try:
        return str(wait_for(lambda: told(cluster, kind), PLAN_S)[0])
    except AssertionError:
        raise AssertionError(f"no {kind}: {cluster.admin('/admin/v1/plan')}") from None


def told(cluster: Cluster, kind: str) -> list[str]:
    """Return the texts of the events of a kind."""
    return [row["reason"] for row in cluster.admin("/admin/v1/events?count=500")["events"] if row["kind"] == kind]


def plan(cluster: Cluster) -> dict[str, Any]:
    code, out, error = cluster.clusterctl("plan", "--live", "-o", "json")
    assert code == 0, error
    return dict(json.loads(out)["plan"])


def counts(cluster: Cluster) -> dict[str, int]:
    pools = cluster.admin("/admin/v1/desired")["desired"]["pools"]
    return {pool["role"]: pool["count"] for pool in pools if pool["count"]}


def test_it_flips_a_worker_under_load_and_no_request_fails() -> None:
    with started("act") as cluster:
        before = cluster.pids()
        with asked(cluster) as clients:
            done = wait_told(cluster, "plan_acted")
            wait_told(cluster, "flipped")
            wait_for_answers(clients, 8)
        assert done.startswith("1P:2D → 2P:1D, because 2P:1D would keep "), done
        assert "flip from decode to prefill" in done
        assert counts(cluster) == roles(cluster) == {"prefill": 2, "decode": 1}
        assert cluster.pids() == before, "nobody was started anew"
        found = plan(cluster)
        assert (found["mode"], found["last_action"]["what"]) == ("act", done)
        wait_balanced(cluster, 3)


def test_advice_is_an_event_and_nothing_more() -> None:
    with started("advise") as cluster:
        version = cluster.admin("/admin/v1/desired")["desired"]["version"]
        with asked(cluster) as clients:
            advice = wait_told(cluster, "plan_advised")
            wait_for_answers(clients, 12)
        assert advice.startswith("1P:2D → 2P:1D, because ")
        assert ", links of " in advice, "they were measured when the first prompts moved"
        assert told(cluster, "plan_advised") == [advice]
        assert (told(cluster, "plan_acted"), told(cluster, "flipping")) == ([], [])
        assert cluster.admin("/admin/v1/desired")["desired"]["version"] == version
        assert plan(cluster)["last_advice"]["what"] == advice
