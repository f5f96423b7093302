"""Prometheus queries of dashboards, alerts and autoscaler rules, taken apart."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.core.metric_names import CATALOGUE, Metric, MetricKind

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "tandem"
ALERTS = CHART / "files" / "alerts.yaml"
_NAME = re.compile(r"(?<![\w:])((?:tandem_|vllm:)[\w:]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SUFFIX = re.compile(r"_(?:bucket|count|sum)$")


def alerts() -> list[dict[str, Any]]:
    """Every rule, with its group's name."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [{"group": group["name"], **rule} for group in groups for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """Every expression, by where it stands."""
    return dict([*_of_alerts(), *_of_dashboards(), *_of_autoscalers()])


def metrics_in(expression: str) -> dict[str, set[str]]:
    """Metrics that it asks for, by the catalogue's name where they are in it, with the labels that it wants of each."""
    grouped = {label.strip() for found in _GROUPING.findall(expression) for label in found.split(",")} - {"", "le"}
    return {metric: matched | grouped for metric, matched in _selected(expression).items()}


def labels_of(metric: str) -> set[str]:
    """Return the metric's labels. A label of a grouping must belong to one of the metrics beside it."""
    return set(CATALOGUE[metric].labels)


def _selected(expression: str) -> Mapping[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, matchers in _NAME.findall(expression):
        found.setdefault(_base(name), set()).update(_MATCHER.findall(matchers))
    return found


def _base(name: str) -> str:
    """Without the suffix of a histogram's sample."""
    metric: Metric | None = CATALOGUE.get(_SUFFIX.sub("", name))
    return str(metric) if metric is not None and metric.kind is MetricKind.HISTOGRAM else name


def _of_alerts() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]


def _of_dashboards() -> Iterator[tuple[str, str]]:
    for path in sorted((CHART / "files" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                where = f"{path.name}: {panel['title']} {target['refId']}"
                yield where, target["expr"].replace("$__rate_interval", "5m")


def _of_autoscalers() -> Iterator[tuple[str, str]]:
    """Triggers of KEDA in the chart's own value files, and the expression that the page of metrics gives."""
    for path in sorted((CHART / "ci").glob("*.yaml")):
        for pool, values in (yaml.safe_load(path.read_text()).get("pools") or {}).items():
            for trigger in (values or {}).get("autoscaling", {}).get("triggers", ()):
                if trigger["type"] == "prometheus":
                    yield f"{path.name}: {pool}", trigger["metadata"]["query"]
    page = (CHART.parents[2] / "docs" / "metrics.md").read_text()
    for number, line in enumerate(re.findall(r"^    (\S.*)$", page, flags=re.MULTILINE)):
        yield f"docs/metrics.md {number}", line
