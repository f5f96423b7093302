"""Alert rules and dashboards, as Prometheus' own program reads them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tandem.core.metric_names import CATALOGUE
from tests.e2e import queries
from tests.integration.deploy.rendering import Helm
from tools import dashboards

HERE = Path(__file__).parent
PAGE = Path(__file__).resolve().parents[3] / "docs" / "operate" / "alerts.md"
ROOT = Path(__file__).resolve().parents[3]
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(ROOT / ".venv" / "bin"))
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="there is no promtool; `tools/get_promtool.sh` takes it out of Debian's package"
)


def promtool(*arguments: str, folder: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_rules_are_sound(tmp_path: Path) -> None:
    promtool("check", "rules", "--lint-fatal", str(queries.ALERTS), folder=tmp_path)


@needs_promtool
def test_alerts_fire_for_what_they_are_for(tmp_path: Path) -> None:
    for file in (queries.ALERTS, HERE / "alerts_test.yaml"):
        shutil.copy(file, tmp_path)
    promtool("test", "rules", "alerts_test.yaml", folder=tmp_path)


@needs_promtool
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"one:{number}", "expr": expression}
        for number, expression in enumerate(queries.expressions().values())
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", "rules.yaml", folder=tmp_path)


def test_every_alert_is_tested_and_has_its_words_on_the_page() -> None:
    named = [rule["alert"] for rule in queries.alerts()]
    assert len(named) == len(set(named)) > 20
    tested = (HERE / "alerts_test.yaml").read_text()
    assert [
        name for name in named if f'alertname="{name}"' not in tested and f"alertname: {name}\n" not in tested
    ] == []
    assert re.findall(r"^## (Tandem\w+)$", PAGE.read_text(), flags=re.MULTILINE) == named


@pytest.mark.parametrize("name", [rule["alert"] for rule in queries.alerts()])
def test_every_run_book_says_what_it_means_what_to_look_at_and_what_to_do(name: str) -> None:
    text = PAGE.read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    paragraphs = [" ".join(one.split()) for one in text.strip().split("\n\n")]
    assert len(paragraphs) == 3
    meaning, look, do = paragraphs
    assert not meaning.startswith("**"), "first what it means"
    assert look.startswith("**Look at** ")
    assert do.startswith(("**Do:** ", "**Do** "))
    assert re.search(r"`(clusterctl|kubectl|tandem_)|\]\(#tandem", look), "a command, a metric or another run-book"
    assert all(one.endswith(".") and len(one.split()) >= 4 for one in paragraphs)


def test_run_books_lead_on_to_run_books() -> None:
    named = {rule["alert"].lower() for rule in queries.alerts()}
    linked = set(re.findall(r"\]\(#(\w+)\)", PAGE.read_text()))
    assert linked
    assert linked <= named


def test_metrics_that_run_books_name_exist() -> None:
    named = set(re.findall(r"`(tandem_\w+)`", PAGE.read_text()))
    assert len(named) > 5
    assert named <= {str(metric) for metric in CATALOGUE}


def test_alerts_say_how_bad_it_is_and_what_is_wrong() -> None:
    for rule in queries.alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")


def test_dashboards_are_what_their_tool_says() -> None:
    assert dashboards.stale() == [], "run `python -m tools.dashboards`"


@pytest.mark.parametrize("where", queries.expressions())
def test_what_is_asked_for_is_in_the_catalogue_with_those_labels(where: str) -> None:
    found = queries.metrics_in(queries.expressions()[where])
    assert found
    known = {label for metric in found for label in queries.labels_of(metric)}
    for wanted in found.values():
        assert wanted <= known, where


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ('sum by (le, x) (rate(tandem_request_queue_seconds_bucket{a="b", c!~"d"}[5m]))',
         {"tandem_request_queue_seconds": {"a", "c", "x"}}),
        ('max(vllm:kv_cache_usage_perc) > on (role) up{z="1"}', {"vllm:kv_cache_usage_perc": {"role"}}),
        ("tandem_invented_total / tandem_plans_total",
         {"tandem_invented_total": set(), "tandem_plans_total": set()}),
    ],
)  # fmt: skip
def test_expressions_are_taken_apart(expression: str, found: dict[str, set[str]]) -> None:
    assert queries.metrics_in(expression) == found


def test_the_chart_brings_them_beside_ones_own(helm: Helm) -> None:
    release = helm.render((queries.CHART / "ci" / "watched.yaml").read_text())
    (rules,) = release.of("PrometheusRule")
    own, (mine,) = rules["spec"]["groups"][:-1], rules["spec"]["groups"][-1:]
    assert own == yaml.safe_load(queries.ALERTS.read_text())["groups"]
    assert mine["name"] == "mine"
    (data,) = (found["data"] for found in release.of("ConfigMap") if "overview.json" in found["data"])
    assert set(data) == {"overview.json", *(f"tandem-{name}.json" for name in dashboards.DASHBOARDS)}
    assert json.loads(data["tandem-transfers.json"]) == dashboards.dashboard("transfers")


def test_without_being_asked_it_brings_none(helm: Helm) -> None:
    release = helm.render((queries.CHART / "ci" / "minimal.yaml").read_text())
    assert release.of("PrometheusRule") == []
