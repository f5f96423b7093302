"""Drains and changes of role in a running cluster under load: no request fails, and every token is the oracle's."""

from tandem.core import metric_names as names
from tandem.core.state_enums import RoleName
from tests.cluster_fixture import cluster_fixture
from tests.e2e.steering import Operator
from tests.e2e.streams import Client, load, prompt, wait_for_answers
from tests.e2e.under_load import changed
from tools.running_cluster import Cluster, is_free
from tools.waiting import wait_for

CONFIG = """
[pools]
prefill = 2
decode = 2
[worker]
engine = "sim"
threads = 1
[worker.sim]
prefill_tokens_per_s = 4000.0
decode_step_s = 0.01
[router]
disaggregation = "always"
"""


BLOCK_TOKENS = 16
LONG_TOKENS = 800
"""Of an answer that is under way while a command is run."""


cluster = cluster_fixture(config=CONFIG)


def counted(cluster: Cluster, name: str) -> float:
    """A counter, over all workers and labels."""
    rows = [row["counters"] for row in cluster.status()["workers"]]
    return float(sum(value for row in rows for key, value in row.items() if key.partition("{")[0] == name))


def test_a_drain_under_load(cluster: Cluster) -> None:
    """Each worker drains and comes back; the others serve."""
    operator = Operator(cluster)
    with load(cluster) as clients:
        for name in ("decode-0", "prefill-1"):
            wait_for(lambda: any(client.tokens for client in clients[-4:]), 60, "tokens flow")
            changed(cluster, "drain", name)
            assert operator.is_drained(name)
            wait_for_answers(clients, 5)
            assert operator.is_drained(name)
            changed(cluster, "uncordon", name)
    wait_for(lambda: is_free(cluster, workers=4), what="nothing in flight, nothing held")


def test_a_deadline_moves_what_runs_without_computing_it_again(cluster: Cluster) -> None:
    """Long answers go on at the other decode worker from the blocks that were there: nothing but the last, partial
    block of each is computed again. A fetch that this machine is too busy for is bounded by its whole sequence."""
    operator = Operator(cluster)
    moved, computed = cluster.metric("tandem_reattempts_total", cause="moved"), counted(cluster, "prefill_tokens")
    fetched, failed = counted(cluster, names.FETCHES), counted(cluster, names.FETCHES_FAILED)
    clients = [Client(cluster.context["grpc"], prompt(50_000 + number), LONG_TOKENS) for number in range(6)]
    wait_for(lambda: all(len(client.tokens) > 100 for client in clients), 60, "tokens flow")
    changed(cluster, "drain", "decode-0", "--deadline", "0")
    assert operator.is_drained("decode-0")
    for client in clients:
        client.check()
    wait_for(lambda: is_free(cluster, workers=4), what="nothing in flight, nothing held")
    moves = cluster.metric("tandem_reattempts_total", cause="moved") - moved
    assert 0 < moves <= 6
    prompts = sum(len(client.prompt) for client in clients)
    wait_for(lambda: counted(cluster, "prefill_tokens") - computed > prompts, what=f"load reports of {moves:g} moves")
    fetches, late = counted(cluster, names.FETCHES) - fetched, counted(cluster, names.FETCHES_FAILED) - failed
    assert 0 < fetches <= moves <= fetches + late
    again = BLOCK_TOKENS * moves + (len(clients[0].prompt) + LONG_TOKENS) * late
    assert counted(cluster, "prefill_tokens") - computed <= prompts + again
    changed(cluster, "uncordon", "decode-0")


def test_a_worker_changes_its_role_and_back_under_load(cluster: Cluster) -> None:
    """Its cache stays: a prompt that it computed is a hit after both changes."""
    operator = Operator(cluster)
    with load(cluster, streams=3):
        for _ in range(2):
            assert operator.flip("prefill-1", RoleName.DECODE).role is RoleName.DECODE
            look = operator.flip("prefill-1", RoleName.PREFILL)
            assert look.role is RoleName.PREFILL
            print(f"without the drain: {look.last_flip_s * 1000:.1f} ms")
    wait_for(lambda: is_free(cluster, workers=4), what="nothing in flight, nothing held")


def test_prefix_hits_continue_on_a_worker_in_its_other_role(cluster: Cluster) -> None:
    """Blocks that it computed as a prefill worker are fetched from it, or used there, as a decode worker."""
    operator, wanted = Operator(cluster), prompt(77, 400)
    changed(cluster, "drain", "prefill-0")
    Client(cluster.context["grpc"], wanted, 5).check()
    changed(cluster, "uncordon", "prefill-0")
    operator.flip("prefill-1", RoleName.DECODE)
    for name in ("decode-0", "decode-1"):
        changed(cluster, "drain", name)

    def held() -> bool:
        said = cluster.admin("/admin/v1/route/explain", {"prompt": wanted})
        return any(row["worker"] == "prefill-1" and row["held_tokens"] == 400 for row in said["workers"])

    wait_for(held, what="the router knows the blocks under the new incarnation")
    failed = counted(cluster, names.FETCHES_FAILED)
    client = Client(cluster.context["grpc"], wanted, 5)
    client.check()
    if client.cached_tokens != 400 - BLOCK_TOKENS:  # prefill-0 has none of it: it comes from there, or is computed
        wait_for(lambda: counted(cluster, names.FETCHES_FAILED) > failed, what="this machine was too busy to fetch it")
    for name in ("decode-0", "decode-1"):
        changed(cluster, "uncordon", name)
    operator.flip("prefill-1", RoleName.PREFILL)
    wait_for(lambda: is_free(cluster, workers=4), what="nothing in flight, nothing held")
