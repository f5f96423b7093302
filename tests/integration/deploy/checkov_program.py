"""Hold the chart, rendered with each of its own value files, against checkov; what `make checkov` runs.

    python -m tests.integration.deploy.checkov_program CHECKOV

Exits with 1 for a finding that the chart's checkov.toml does not explain, and for an exception that finds nothing.
checkov knows nothing of a RayCluster, so its pods are shown to it as pods.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.integration.deploy.rendering import CHART, GOOD, NAMESPACE, Helm, Object, Release

COMPONENT = "app.kubernetes.io/component"
Finding = tuple[str, str]
"""Check, component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exempt:
    """Findings that are left as they are."""

    check: str
    says: str
    components: tuple[str, ...]
    why: str

    def findings(self) -> set[Finding]:
        return {(self.check, component) for component in self.components}


def exceptions(path: Path = CHART / "checkov.toml") -> list[Exempt]:
    listed = tomllib.loads(path.read_text())["exception"]
    return [Exempt(**{**one, "components": tuple(one["components"])}) for one in listed]


def judge(found: Iterable[Finding], known: Iterable[Exempt]) -> tuple[list[Finding], list[Finding]]:
    """(findings that nothing explains, exceptions that find nothing)."""
    there, explained = set(found), {each for one in known for each in one.findings()}
    return sorted(there - explained), sorted(explained - there)


def objects(release: Release) -> list[Object]:
    """The objects that checkov gets."""
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**group["metadata"], "namespace": NAMESPACE},
            "spec": group["spec"]["template"]["spec"],
        }
        for group in release.workloads()
        if group["kind"] == "RayGroup"
    ]
    return [*(one for one in release.objects if one["kind"] != "RayCluster"), *pods]


def look(checkov: Path) -> tuple[int, set[Finding]]:
    """(checks that passed, findings) over all value files."""
    components: dict[str, str] = {}
    helm = Helm()
    with tempfile.TemporaryDirectory() as folder:
        for values in GOOD:
            shown = objects(helm.render(values.read_text()))
            for one in shown:
                components[f"{one['kind']}.{NAMESPACE}.{one['metadata']['name']}"] = one["metadata"]["labels"][
                    COMPONENT
                ]
            Path(folder, values.name).write_text(yaml.safe_dump_all(shown))
        helm.close()
        report = _run(checkov, Path(folder))
    failed = report["results"]["failed_checks"]
    return report["summary"]["passed"], {(one["check_id"], components[one["resource"]]) for one in failed}


def _run(checkov: Path, folder: Path) -> Mapping[str, Any]:
    command = [str(checkov), "-d", str(folder), "--framework", "kubernetes", "--output", "json", "--compact"]
    done = subprocess.run([*command, "--skip-download"], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout, done.stderr
    report: Mapping[str, Any] = json.loads(done.stdout)
    assert not report["summary"]["parsing_errors"], report["summary"]
    return report


def main() -> int:
    passed, found = look(Path(sys.argv[1]))
    unexplained, stale = judge(found, exceptions())
    for check, component in unexplained:
        print(f"{check} of {component}: neither mended nor explained in {CHART.name}/checkov.toml")
    for check, component in stale:
        print(f"{check} of {component}: explained in {CHART.name}/checkov.toml, and not found")
    print(f"{passed} checks passed, {len(found)} findings are explained" if not unexplained else "")
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
