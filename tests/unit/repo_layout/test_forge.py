"""The forge runs what CI runs everywhere, and its forms ask for what a bug needs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def document(*path: str) -> Any:
    return yaml.safe_load(ROOT.joinpath(*path).read_text())


def test_the_workflow_runs_what_ci_runs_everywhere() -> None:
    workflow = document(".github", "workflows", "ci.yml")
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert job["runs-on"].startswith("ubuntu")
    assert job["timeout-minutes"] == 90
    (python,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert least == f">={python['python-version']}"
    (kept,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert (kept["with"]["path"], kept["if"]) == ("build/*.out", "${{ !cancelled() }}")
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_is_one_that_forges_take(form: Path) -> None:
    found = document(str(form))
    assert {"name", "description", "body"} <= set(found)
    names = [field["id"] for field in found["body"]]
    assert len(names) == len(set(names))
    for field in found["body"]:
        assert field["type"] in {"textarea", "input"}
        assert field["attributes"]["label"]


def test_a_bug_is_told_with_what_is_needed_to_repeat_it() -> None:
    fields = {field["id"]: field for field in document(".github", "ISSUE_TEMPLATE", "bug.yml")["body"]}
    needed = {name for name, field in fields.items() if field.get("validations", {}).get("required")}
    assert needed == {"what", "command", "version", "doctor", "level"}
    assert "clusterctl doctor -o json" in fields["doctor"]["attributes"]["description"]
    assert "logs" in fields
