"""Helm's own code, in a process of its own: it brings a Go runtime, which no test process should have inside.

Each line of stdin is a request, {"values": YAML, "name": …, "namespace": …}; the answer is a line,
{"manifests": {template: text}, "lint": [finding]} or {"error": text}. With "do", one of install, upgrade, rollback,
uninstall, history and status, it is done to the cluster of "cluster" and answered with {"done": Helm's report of it}.
"""

import json
import sys
from typing import Any

import helm_python as helm

WARNING = 2


def answer(chart: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "do" in request:
            return {"done": done(chart, request)}
        values = helm.values_from_yaml(request["values"])
        with helm.Chart.load(chart) as loaded:
            manifests = loaded.render(values, name=request["name"], namespace=request["namespace"])
        report = helm.lint(chart, values, strict=True, namespace=request["namespace"])
    except helm.HelmError as error:
        return {"error": str(error)}
    found = [f"{note['path']}: {note['error']}" for note in report["messages"] if note["severity"] >= WARNING]
    return {"manifests": manifests, "lint": [*found, *report["errors"]]}


def done(chart: str, request: dict[str, Any]) -> Any:
    what, options = request["do"], request["options"]
    given = {**request["cluster"], "namespace": request["namespace"]}
    with helm.Config(burst_limit=200, qps=200.0, **given) as cluster:
        if what in ("install", "upgrade"):
            values = helm.values_from_yaml(request["values"])
            return getattr(cluster, what)(chart, request["name"], values, **options)
        return getattr(cluster, what)(request["name"], **options)


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(sys.argv[1], json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
