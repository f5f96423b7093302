"""Write docs/metrics.md: every metric of `core/tandem/core/metric_names.py`, with notes that hold for all of them.

python -m tools.metrics_page [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tandem.core.label_limiter import MAX_VALUES
from tandem.core.metric_names import CATALOGUE, Metric, MetricSource

FILE: Final = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD: Final = """\
# Metrics

`tools/metrics_page.py` makes this page from `core/tandem/core/metric_names.py`; a test holds it against that module,
and against a scrape of a running cluster.

Routers answer `GET /metrics` in the text format of Prometheus: on the API's port with a key of the scope `metrics`
([keys](tenants.md#what-a-key-allows)), on the admin port, which listens on loopback, without one. Workers have no port
for it: they report their counters to every router ten times a second, and each exports what all workers said last.

## How to add up

- **Routers count each their own requests.** Add them up: `sum(rate(tandem_requests_total[5m]))`.
- **What has a label `worker` every router says alike.** Take one of them, then add workers up:
  `sum(max by (worker, role) (rate(tandem_prefill_tokens_total[5m])))`. Counters of a worker begin at 0 when it starts
  or takes another role.
- **A router of several processes** answers for all of them, on both ports: requests are sums, what workers reported and
  what is said of the index and the cluster counts once. A worker is up when every process is connected to it, a breaker
  and the retry budget are those of the process that is worst off, and `tandem_router_process_up` says who answered.
- **Labels are bounded.** Workers, roles, causes and reasons; never a request, a tenant or a prompt. `peer` takes
  {peers} values a worker, all others are `other`. A counter that this release does not know is left out.
- **Beside each counter and histogram** stands a gauge `…_created`, when it began, which the tables leave out.

The names of vLLM, at the end, are for autoscalers, endpoint pickers and dashboards that were made for it. They stand on
the routers' scrape, with a worker's name where vLLM has a process's: whoever scrapes pods one by one finds them at
routers, not at workers. Requests that no worker has yet wait in routers, so a rule that scales prefill workers asks for

    sum(max by (worker) (vllm:num_requests_waiting{role!="decode"})) + sum(tandem_admission_waiting_requests)

How busy a worker is, is the rate of `tandem_step_seconds_total`.

## MFU and MBU

The share of an accelerator's peak that a model makes use of: of its FLOPs (MFU), which is what prefill is bound by, and
of its memory's bytes a second (MBU), which is what decode is bound by. Workers count what they did by arithmetic of the
model's shape, and routers divide nothing: a share of an unknown peak would be made up. Say the peak, of one rank and by
the data sheet, in [`[worker]`](configuration.md#worker) or for one role, and ask for

    max by (worker) (rate(tandem_model_flops_total[5m])) / max by (worker) (tandem_worker_peak_flops_per_second)
    max by (worker) (rate(tandem_model_read_bytes_total[5m])) / max by (worker) (tandem_worker_peak_bytes_per_second)

A worker whose peak nobody said is in neither. Time without work counts; divide by the rate of
`tandem_step_seconds_total` for the share while it computes. What is counted, in `engine/tandem/engine/model_work.py`:

- **FLOPs**: 2 for each number of the matrices that a token passes, and 4 · layers · heads · head_dim for each token
  that it attends to. The head, and what is behind the last attention, count only for tokens whose logits were wanted.
- **Bytes**: those matrices once a step, and the KV of each sequence's context once a step.
- **Latents**: 2 · layers · heads · (the row that is cached + `kv_lora_rank`) for each token that is attended to.
- **Experts**: FLOPs of those that a token meets; bytes of as many as the tokens of a step meet together if each drew
  its own at random, which is more than they do where a router prefers some.
- **Not counted**: norms, biases, activations, lookups of embeddings, what is written, and what a kernel reads twice.
  What ranks hold several times counts once. KV that sequences share counts for each of them, for each reads it.
- Sliding windows count as if tokens attended to the whole context, so the shares of such models are too high.
- Tokens that are computed again count again; a simulated engine (`engine = "sim"`) computes no model and says nothing.
"""


def text() -> str:
    """The page."""
    return HEAD.replace("{peers}", str(MAX_VALUES)) + "".join(
        _section(source) for source in MetricSource if any(_of(source))
    )


def _of(source: MetricSource) -> Iterator[Metric]:
    return (metric for metric in CATALOGUE.values() if metric.source is source)


def _section(source: MetricSource) -> str:
    rows = "".join(map(_row, _of(source)))
    return f"\n## {source.value}\n\n| metric | kind | labels | |\n|---|---|---|---|\n{rows}"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric}` | {metric.kind} | {labels} | {metric.text} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, change nothing")
    if not parser.parse_args().check:
        FILE.write_text(text(), encoding="utf-8")
        return 0
    is_current = FILE.is_file() and FILE.read_text(encoding="utf-8") == text()
    if not is_current:
        sys.stderr.write(f"{FILE.name} is not what the metrics are; run `python -m tools.metrics_page`\n")
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main())
