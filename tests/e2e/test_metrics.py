"""The exports of a running cluster match docs/metrics.md: names, kinds and labels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from tandem.core import metric_names as names
from tandem.core.metric_names import CATALOGUE, MetricKind
from tests.e2e.queries import expressions, metrics_in
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

PROMPT = [(7 * k) % 3000 + 600 for k in range(150)]
ENDS = {MetricKind.COUNTER: ("_total",), MetricKind.GAUGE: ("",), MetricKind.HISTOGRAM: ("_bucket", "_count", "_sum")}
FLAGS = ("--engine", "sim", "--prefill", "2", "--decode", "2", "--disaggregation", "always", "--model", str(MODEL))
CONFIG = """
[slo.fast]
ttft_s = 10.0
itl_s = 1.0

[admission]
default_slo = "fast"

[planner]
mode = "advise"
interval_s = 0.5

[price]
prefill = 2.0
decode = 1.0

[worker]
peak_flops_per_s = 2e12
peak_bytes_per_s = 3e10

[decode]
peak_flops_per_s = 1e12
"""
OF_A_MODEL = {names.MODEL_FLOPS, names.MODEL_READ_BYTES, names.PEAK_FLOPS, names.PEAK_BYTES}
"""Nothing of a simulated engine."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One that has answered requests, two of them with the same prompt."""
    with running(*FLAGS, "--processes", str(request.param), config=CONFIG) as cluster:
        wait_for(lambda: len(cluster.pids()) == 4, what="all workers are there, so that equal prompts meet")
        for number in (0, 0, 1, 2):
            cluster.complete([600 + number, *PROMPT], 20)
        yield cluster


def families(cluster: Cluster) -> dict[str, Family]:
    """Return the admin port's families, by the name in the catalogue; without their times of creation."""
    every = text_string_to_metric_families(cluster.scrape())
    found = [one for one in every if not one.name.endswith("_created")]
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in found}


def test_every_name_is_in_the_catalogue_with_its_kind_and_labels(cluster: Cluster) -> None:
    for name, family in families(cluster).items():
        metric = CATALOGUE[name]
        assert family.type == metric.kind, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample
            assert sample.name.startswith(family.name)
            assert sample.name.removeprefix(family.name) in ENDS[metric.kind], sample


def phases_with_a_cost(cluster: Cluster) -> set[str]:
    """After one more answer: what came before the router first looked costs nothing."""
    assert cluster.post("/v1/completions", {"model": "tandem-tiny", "prompt": PROMPT, "max_tokens": 5})[0] == 200
    return {sample.labels["phase"] for sample in families(cluster)[names.COST].samples}


def test_what_answers_bring_about_is_measured(cluster: Cluster) -> None:
    def count(name: str, suffix: str = "") -> float:
        family = families(cluster)[name]
        return sum(sample.value for sample in family.samples if sample.name == name + suffix)

    for histogram in (names.TTFT, names.SECOND_TOKEN, names.E2E, names.QUEUE, names.PREFILL, names.TRANSFER,
                      names.DECODE, names.HANDOFF_OVERHEAD):  # fmt: skip
        assert count(histogram, "_count") == 4, histogram
    assert count(names.ITL, "_count") > 0
    assert count(names.PROMPT_TOKENS) == 4 * (1 + len(PROMPT))
    assert count(names.GENERATED_TOKENS) == 4 * 20
    assert count(names.CACHED_TOKENS) > 0
    for counter in (names.KV_LINK_BYTES, names.KV_LINK_SECONDS, names.KV_LINK_TRANSFERS, names.HANDOVERS, names.STEPS):
        wait_for(lambda counter=counter: counter in families(cluster) and count(counter) > 0)  # type: ignore[misc]

    def connected() -> float:
        return sum(sample.value for sample in families(cluster)[names.WORKER_UP].samples)

    wait_for(lambda: connected() == 4, what="every process is connected to every worker")
    assert count(names.VLLM_TTFT, "_count") == 4
    assert count(names.VLLM_GENERATION_TOKENS) == 4 * 20
    assert {s.labels["model_name"] for s in families(cluster)[names.VLLM_RUNNING].samples} == {"tandem-tiny"}
    for _ in range(6):  # whichever process answers
        assert cluster.metric(names.GENERATED_TOKENS) == 4 * 20
    wanted = {sample.labels["role"]: sample.value for sample in families(cluster)[names.DESIRED_WORKERS].samples}
    assert wanted == {"prefill": 2, "decode": 2, "mixed": 0}
    wait_for(lambda: phases_with_a_cost(cluster) == {"prefill", "decode"})
    wait_for(lambda: names.KV_LINK_SPEED in families(cluster), what="workers told of their links")


def test_every_panel_alert_and_autoscaler_finds_what_it_asks_for(cluster: Cluster) -> None:
    wanted = {metric for expression in expressions().values() for metric in metrics_in(expression)}
    assert len(wanted) > 40
    if cluster.status()["router"].get("processes") is None:
        wanted -= {names.ROUTER_PROCESS_UP}
    assert wanted >= OF_A_MODEL
    assert not OF_A_MODEL & set(families(cluster))
    wanted -= OF_A_MODEL

    def missing() -> set[str]:
        phases_with_a_cost(cluster)
        return wanted - {name for name, family in families(cluster).items() if family.samples}

    assert wait_for(lambda: not missing() or None, 60, f"a sample of {sorted(missing())}")


def test_the_work_of_a_model_is_counted_and_peaks_are_as_configured(tmp_path: Path) -> None:
    """By hand: 5 layers of 131,072 numbers before attention and 655,360 behind it, and a head of 1,048,576; the last
    layer's part behind attention and the head for logit rows alone. Heads have 256 numbers together, KV 2,560 bytes."""
    token, row, pair, numbers = 2 * 3_276_800, 2 * 1_703_936, 4 * 5 * 256, 3_276_800 + 1_703_936
    flags = ("--prefill", "1", "--decode", "1", "--disaggregation", "always", "--model", str(MODEL))
    with running(*flags, "--dtype", "bfloat16", config=CONFIG) as cluster:

        def by_role(name: str) -> dict[str, float]:
            family = families(cluster).get(name)
            return {} if family is None else {sample.labels["role"]: sample.value for sample in family.samples}

        def counted(prompts: int, answers: int) -> dict[str, dict[str, float]]:
            def is_told() -> bool:
                computed, answered = by_role(names.PREFILL_TOKENS), by_role(names.DECODE_TOKENS)
                return computed.get("prefill", 0) >= prompts and answered.get("decode", 0) >= answers

            wait_for(is_told, what="the last load reports")
            return {name: by_role(name) for name in OF_A_MODEL}

        before = counted(2, 1)  # of the request by which the router proved that the two can answer
        cluster.complete(PROMPT, 20, ignore_eos=True)
        contexts = range(len(PROMPT) + 1, len(PROMPT) + 20)  # of the 19 steps after the first token
        found = counted(2 + len(PROMPT), 1 + len(contexts))

        def grown(name: str, role: str) -> float:
            return found[name][role] - before[name][role]

        assert grown(names.MODEL_FLOPS, "prefill") == len(PROMPT) * token + sum(range(len(PROMPT) + 1)) * pair + row
        assert grown(names.MODEL_FLOPS, "decode") == len(contexts) * (token + row) + sum(contexts) * pair
        assert grown(names.MODEL_READ_BYTES, "decode") == len(contexts) * 2 * numbers + sum(contexts) * 2_560
        assert grown(names.MODEL_READ_BYTES, "prefill") >= 2 * numbers + len(PROMPT) * 2_560
        assert found[names.PEAK_FLOPS] == {"prefill": 2e12, "decode": 1e12}
        assert found[names.PEAK_BYTES] == {"prefill": 3e10, "decode": 3e10}
