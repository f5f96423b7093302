"""Metrics again under the names of vLLM, for autoscalers, endpoint pickers and dashboards that were made for it.
Nothing is measured here: samples are copied when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from tandem.core import metric_names as names
from tandem.core.metric_names import Metric
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.proto_convert import ReportedLoad, WorkerFacts

_OF_REQUESTS: Final[Mapping[Metric, Metric]] = {
    names.VLLM_TTFT: names.TTFT,
    names.VLLM_ITL: names.ITL,
    names.VLLM_E2E: names.E2E,
    names.VLLM_QUEUE: names.QUEUE,
    names.VLLM_PREFILL: names.PREFILL,
    names.VLLM_DECODE: names.DECODE,
    names.VLLM_PROMPT_TOKENS: names.PROMPT_TOKENS,
    names.VLLM_GENERATION_TOKENS: names.GENERATED_TOKENS,
    names.VLLM_CACHE_QUERIES: names.PROMPT_TOKENS,
    names.VLLM_CACHE_HITS: names.CACHED_TOKENS,
}


class VllmCollector(Collector):
    """`measured`: what the router measures of requests, by its own name, each with the label `model`."""

    def __init__(
        self, links: Callable[[], Iterable[WorkerLink]], measured: Mapping[Metric, Counter | Histogram]
    ) -> None:
        self._links, self._measured = links, measured

    def describe(self) -> list[Family]:
        return []  # nothing to be compared with other collectors' names

    def collect(self) -> Iterator[Family]:
        for alias, own in _OF_REQUESTS.items():
            yield _copy(alias, self._measured[own])
        yield from self._of_workers()

    def _of_workers(self) -> Iterator[Family]:
        known = [(link.facts, link.load) for link in self._links() if link.facts is not None]
        for metric, value in _OF_WORKERS.items():
            family = Family(metric.removesuffix("_total"), metric.text, metric.kind)
            for facts, load in known:
                family.add_sample(str(metric), _labels(facts), value(load))
            yield family
        info = Family(names.VLLM_CACHE_CONFIG, names.VLLM_CACHE_CONFIG.text, names.VLLM_CACHE_CONFIG.kind)
        for facts, _ in known:
            sizes = {"block_size": str(facts.block_tokens), "num_gpu_blocks": str(min(facts.num_blocks, default=0))}
            info.add_sample(str(names.VLLM_CACHE_CONFIG), _labels(facts) | sizes, 1.0)
        yield info


def kv_usage(load: ReportedLoad) -> float:
    """The share of the fullest group's blocks that are in use, 0 to 1; cached ones not in use are free."""
    shares = [1.0 - (blocks.free + blocks.cached) / blocks.total for blocks in load.blocks if blocks.total]
    return max(shares, default=0.0)


_OF_WORKERS: Final[Mapping[Metric, Callable[[ReportedLoad], float]]] = {
    names.VLLM_RUNNING: lambda load: load.running_requests,
    names.VLLM_WAITING: lambda load: load.queued_requests,
    names.VLLM_KV_USAGE: kv_usage,
    names.VLLM_KV_USAGE_BEFORE: kv_usage,
    names.VLLM_PREEMPTIONS: lambda load: load.counters.get("preemptions", 0.0),
}


def _labels(facts: WorkerFacts) -> dict[str, str]:
    return {"model_name": facts.model, "worker": facts.worker, "role": facts.role.value}


def _copy(alias: Metric, own: Counter | Histogram) -> Family:
    (measured,) = own.collect()
    family = Family(alias.removesuffix("_total"), alias.text, alias.kind)
    for sample in measured.samples:
        suffix = sample.name.removeprefix(measured.name)
        if suffix != "_created":
            others = {label: value for label, value in sample.labels.items() if label != "model"}
            labels = {"model_name": sample.labels["model"], **others}
            family.add_sample(family.name + suffix, labels, sample.value)
    return family
