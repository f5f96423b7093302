"""Write the Grafana dashboards of the chart: `deploy/helm/tandem/files/dashboards/*.json`.

    python -m tools.dashboards [--check]

Every router exports the same reports of workers: queries take them from one router (`max by (worker, …)`) before they
add workers up.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "tandem" / "files" / "dashboards"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture over time: expressions, each with the label of its lines; `unit` as in Grafana."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Rate of a counter of routers, all of them together."""
    return f"sum{_by(by)} (rate({metric}{{{where}}}[$__rate_interval]))"


def of_workers(metric: str, by: str, where: str = "", *, how: str = "sum", is_counter: bool = True) -> str:
    """Values that workers report, or how fast they grow: of each worker once, then `how` by those labels."""
    once = ", ".join(dict.fromkeys(("worker", *by.split(", "))))
    inner = f"rate({metric}{{{where}}}[$__rate_interval])" if is_counter else f"{metric}{{{where}}}"
    return f"{how} by ({by}) (max by ({once}) ({inner}))"


def of_peak(counter: str, what: str) -> str:
    """Rate of a worker's counter, as a share of the peak of its accelerators."""
    peak = of_workers(f"tandem_worker_peak_{what}_per_second", "worker, role", is_counter=False)
    return f"{of_workers(counter, 'worker, role')} / {peak}"


def quantiles(metric: str, *shares: float) -> tuple[tuple[str, str], ...]:
    """Quantiles of a histogram, by model."""
    rates = f"sum by (model, le) (rate({metric}_bucket[$__rate_interval]))"
    return tuple((f"histogram_quantile({share}, {rates})", f"{{{{model}}}} p{share * 100:g}") for share in shares)


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


BUSY: Final = of_workers("tandem_step_seconds_total", "role", how="avg")
DASHBOARDS: Final[dict[str, tuple[str, tuple[Panel, ...]]]] = {
    "overview": (
        "Tandem: overview",
        (
            Panel("Requests", "reqps", ((rate("tandem_requests_total", "outcome"), "{{outcome}}"),)),
            Panel("Time to first token", "s", quantiles("tandem_time_to_first_token_seconds", 0.5, 0.99)),
            Panel("Inter-token latency", "s", quantiles("tandem_inter_token_latency_seconds", 0.5, 0.99)),
            Panel(
                "Goodput", "reqps",
                ((rate("tandem_slo_requests_total", "slo", 'outcome="met"'), "{{slo}}"),),
                "Requests that got what their SLO class promises.",
            ),
            Panel(
                "Tokens", "short",
                ((rate("tandem_prompt_tokens_total"), "in"), (rate("tandem_generation_tokens_total"), "out"),
                 (rate("tandem_cached_prompt_tokens_total"), "in, cached")),
            ),
            Panel(
                "Cost of a million tokens", "short",
                (("max by (phase) (tandem_cost_per_million_tokens)", "{{phase}}"),),
                "With [price] in the configuration, in its unit.",
            ),
            Panel(
                "Workers that take work", "short",
                ((of_workers("tandem_worker_state", "role", 'state="ready"', is_counter=False), "{{role}}"),
                 ("max by (role) (tandem_desired_workers)", "{{role}}, wanted")),
            ),
            Panel(
                "Requests under way", "short",
                (("sum(tandem_router_in_flight_requests)", "in flight"),
                 ("sum(tandem_admission_waiting_requests)", "waiting for room"),
                 ("sum(tandem_router_waiting_requests)", "without a worker")),
            ),
            Panel("Events", "short", (
                ("max by (kind) (increase(tandem_cluster_events_total[$__rate_interval])) > 0", "{{kind}}"),)),
        ),
    ),
    "balance": (
        "Tandem: prefill and decode",
        (
            Panel("Busy", "percentunit", ((BUSY, "{{role}}"),), "The share of time that workers spend in steps."),
            Panel(
                "Workers", "short",
                ((of_workers("tandem_worker_state", "role", 'state="ready"', is_counter=False), "{{role}}"),
                 ("max by (role) (tandem_planned_workers)", "{{role}}, by the planner")),
            ),
            Panel(
                "Decisions of the planner", "short",
                (('max by (kind) (increase(tandem_cluster_events_total{kind=~"plan_.*|flipped"}[$__rate_interval]))',
                  "{{kind}}"),),
            ),
            Panel(
                "Prompt tokens that wait", "short",
                ((of_workers("tandem_worker_queued_tokens", "role", is_counter=False), "{{role}}"),),
            ),
            Panel(
                "Tokens computed", "short",
                ((of_workers("tandem_prefill_tokens_total", "role"), "{{role}}, prompts"),
                 (of_workers("tandem_decode_tokens_total", "role"), "{{role}}, output")),
            ),
            Panel(
                "KV in use", "percentunit",
                (("max by (role) (vllm:kv_cache_usage_perc)", "{{role}}, fullest"),
                 ("avg by (role) (max by (worker, role) (vllm:kv_cache_usage_perc))", "{{role}}")),
            ),
            Panel("Queue at workers", "s", quantiles("tandem_request_queue_seconds", 0.5, 0.95)),
            Panel("Prefill", "s", quantiles("tandem_request_prefill_seconds", 0.5, 0.95)),
            Panel("Decode", "s", quantiles("tandem_request_decode_seconds", 0.5, 0.95)),
            Panel("Plans", "reqps", ((rate("tandem_plans_total", "reason"), "{{reason}}"),)),
            Panel("Preemptions", "short", ((of_workers("tandem_preemptions_total", "worker"), "{{worker}}"),)),
            Panel(
                "States of workers", "short",
                ((of_workers("tandem_worker_state", "state", is_counter=False), "{{state}}"),),
            ),
            Panel(
                "MFU", "percentunit", ((of_peak("tandem_model_flops_total", "flops"), "{{worker}}, {{role}}"),),
                "Of workers with [worker] peak_flops_per_s; time without work counts.",
            ),
            Panel(
                "MBU", "percentunit", ((of_peak("tandem_model_read_bytes_total", "bytes"), "{{worker}}, {{role}}"),),
                "Of workers with [worker] peak_bytes_per_s; time without work counts.",
            ),
        ),
    ),
    "transfers": (
        "Tandem: transfers",
        (
            Panel(
                "Bytes by link", "Bps",
                ((of_workers("tandem_kv_link_bytes_total", "worker, peer"), "{{worker}} → {{peer}}"),),
            ),
            Panel(
                "Speed of links while busy", "Bps",
                (("max by (worker, peer, transport) (tandem_kv_link_bytes_per_second) > 0",
                  "{{worker}} → {{peer}}, {{transport}}"),),
            ),
            Panel(
                "Transfers by outcome", "short",
                ((of_workers("tandem_kv_link_transfers_total", "outcome, peer"), "to {{peer}}: {{outcome}}"),),
            ),
            Panel("Hand-off overhead", "s", quantiles("tandem_handoff_overhead_seconds", 0.5, 0.99)),
            Panel("First token to first step there", "s", quantiles("tandem_request_transfer_seconds", 0.5, 0.99)),
            Panel("Second token", "s", quantiles("tandem_time_to_second_token_seconds", 0.5, 0.99)),
            Panel(
                "Seconds of a transfer", "s",
                ((of_workers("tandem_kv_link_seconds_total", "worker, peer") + " / "
                  + of_workers("tandem_kv_link_transfers_total", "worker, peer", 'outcome="verified"'),
                  "{{worker}} → {{peer}}"),),
                "From the ticket to the word that all is verified; the prompt is computed meanwhile.",
            ),
            Panel(
                "Leases and held blocks", "short",
                ((of_workers("tandem_transfer_leases", "role", is_counter=False), "{{role}}: leases"),
                 (of_workers("tandem_kv_blocks", "role, group, state", 'state=~"pushing|reserved"', is_counter=False),
                  "{{role}}: {{state}}")),
            ),
            Panel(
                "Trouble", "short",
                ((of_workers("tandem_kv_frames_dropped_total", "reason") + " > 0", "frame dropped: {{reason}}"),
                 (of_workers("tandem_transfers_forgotten_total", "role"), "{{role}}: lease ran out"),
                 (rate("tandem_reattempts_total", where='cause="transfer"'), "tried again")),
            ),
        ),
    ),
    "router": (
        "Tandem: routers",
        (
            Panel(
                "Waiting for room", "s",
                ((f"histogram_quantile(0.95, {rate('tandem_admission_wait_seconds_bucket', 'le')})",
                  "p95 of those that waited"),),
            ),
            Panel("Told to come back later", "reqps", (
                (rate("tandem_admission_refused_total", "reason"), "{{reason}}"),)),
            Panel("Attempts after failures", "reqps", (
                (rate("tandem_reattempts_total", "cause"), "{{cause}}"),
                (rate("tandem_reattempts_denied_total", "reason"), "given up: {{reason}}"))),
            Panel("Prefix tokens", "short", (
                (rate("tandem_prefix_predicted_tokens_total"), "predicted"),
                (rate("tandem_prefix_actual_tokens_total"), "found"))),
            Panel("Predictions that were wrong", "reqps", (
                (rate("tandem_prefix_mismatch_total", "basis, found"), "{{found}} than by {{basis}}"),)),
            Panel("Computed again", "short", (
                (rate("tandem_recomputed_tokens_total", "cause"), "{{cause}}"),)),
            Panel("Error of predicted times", "s", quantiles("tandem_time_to_first_token_error_seconds", 0.5, 0.95)),
            Panel("Prefix index", "short", (("max(tandem_index_blocks)", "blocks"),)),
            Panel("Trouble of the index", "short", (
                (rate("tandem_index_trouble_total", "kind"), "{{kind}}"),)),
            Panel("Retry budget", "short", (("min(tandem_retry_budget_tokens)", "least of a router"),)),
            Panel("Breakers", "short", (("max by (worker) (tandem_worker_breaker_state) > 0", "{{worker}}"),)),
            Panel("Chunks that fences dropped", "short", (
                (rate("tandem_router_dropped_chunks_total", "reason"), "{{reason}}"),)),
        ),
    ),
}  # fmt: skip
"""File name, title and panels."""


def dashboard(name: str) -> dict[str, Any]:
    """The dashboard in Grafana's import format; the data source is chosen there."""
    title, panels = DASHBOARDS[name]
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": f"tandem-{name}",
        "title": title,
        "tags": ["tandem"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def text(name: str) -> str:
    """A file's content."""
    return json.dumps(dashboard(name), indent=1, ensure_ascii=False) + "\n"


def stale() -> list[str]:
    """Files that differ from this module's, or that it does not make."""
    wanted = {f"{name}.json": text(name) for name in DASHBOARDS}
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    return sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, change nothing")
    if not parser.parse_args().check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name in DASHBOARDS:
            (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")
        return 0
    if names := stale():
        sys.stderr.write(f"{', '.join(names)}: not what tools/dashboards.py says; run `python -m tools.dashboards`\n")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
