"""Each exception that the chart asks of checkov is true of it, and no wider. `make checkov` asks checkov itself."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.deploy.checkov_program import Exempt, exceptions, judge, objects
from tests.integration.deploy.rendering import CHART, GOOD, Container, Helm

LISTED = exceptions()
IS_SO: dict[str, Callable[[Container], bool]] = {
    "CKV_K8S_8": lambda each: "livenessProbe" not in each.spec,
    "CKV_K8S_9": lambda each: "readinessProbe" not in each.spec,
    "CKV_K8S_11": lambda each: "cpu" not in each.spec["resources"]["limits"],
    "CKV_K8S_15": lambda each: each.spec["imagePullPolicy"] != "Always",
    "CKV_K8S_43": lambda each: "@sha256:" not in each.spec["image"],
}
"""The objects that each check looks at."""


@pytest.fixture(scope="module")
def containers(helm: Helm) -> list[Container]:
    return [each for path in GOOD for each in helm.render(path.read_text()).containers()]


def test_each_says_why() -> None:
    assert len({one.check for one in LISTED}) == len(LISTED)
    assert all(len(one.why.split()) > 10 for one in LISTED)
    assert {one.check for one in LISTED} == set(IS_SO)
    assert "checkov.toml" in (CHART / ".helmignore").read_text().splitlines()
    assert "`checkov.toml`" in (CHART / "README.md").read_text()


@pytest.mark.parametrize("one", LISTED, ids=lambda one: str(one.check))
def test_it_is_so_and_nowhere_else(one: Exempt, containers: list[Container]) -> None:
    there = {each.component for each in containers if IS_SO[one.check](each)}
    assert set(one.components) == there


def test_a_value_that_a_reason_names_is_there() -> None:
    values = (CHART / "values.yaml").read_text()
    for word in ("pullPolicy:", "digest:", "limits:"):
        assert word in values


def test_what_is_not_explained_is_told_and_what_is_no_more(tmp_path: Path) -> None:
    known = [Exempt(check="A", says="", components=("router", "worker"), why="")]
    assert judge([("A", "router"), ("A", "worker")], known) == ([], [])
    assert judge([("A", "router"), ("B", "router")], known) == ([("B", "router")], [("A", "worker")])


def test_pods_of_a_raycluster_are_shown_as_pods(helm: Helm) -> None:
    shown = objects(helm.render((CHART / "ci" / "ray.yaml").read_text()))
    pods = [one for one in shown if one["kind"] == "Pod"]
    assert {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in pods} == {"head", "worker"}
    assert not [one for one in shown if one["kind"] == "RayCluster"]
