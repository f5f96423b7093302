"""The chart as Helm renders it: objects by kind, their pods, and what stands in their configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "tandem"
GOOD = sorted((CHART / "ci").glob("*.yaml"))
NAME, NAMESPACE = "demo", "serving"
Object = dict[str, Any]


class HelmError(Exception):
    """Helm's refusal, in its words."""


class Helm:
    """Helm in a process of its own; `close` ends it."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        program = Path(__file__).with_name("helm_program.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(CHART)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
        )
        self._known: dict[str, dict[str, Any]] = {}

    def render(self, values: str, *, name: str = NAME) -> Release:
        """The chart with these values, a YAML text; raises HelmError."""
        if values + name not in self._known:
            self._known[values + name] = self._ask({"values": values, "name": name, "namespace": NAMESPACE})
        answer = self._known[values + name]
        if "error" in answer:
            raise HelmError(answer["error"])
        return Release(answer["manifests"], answer["lint"])

    def act(self, what: str, cluster: Mapping[str, str], *, values: str = "", name: str = NAME, **options: Any) -> Any:
        """Run `helm install` and the like on a cluster; return Helm's report of it. Raises HelmError."""
        request = {"do": what, "cluster": cluster, "values": values, "options": options}
        answer = self._ask({**request, "name": name, "namespace": NAMESPACE})
        if "error" in answer:
            raise HelmError(answer["error"])
        return answer["done"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))


class _Strict(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that stands twice in one map."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{sorted(twice)} twice, {node.start_mark}"
        return dict(super().construct_mapping(node, deep))


@dataclass(frozen=True, slots=True)
class Container:
    """A container, and the object that it is part of."""

    owner: Object
    pod: Object
    spec: Object

    @property
    def label(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def component(self) -> str:
        return str(self.owner["metadata"]["labels"]["app.kubernetes.io/component"])

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def command(self) -> list[str]:
        return [*self.spec.get("command", ()), *self.spec.get("args", ())]

    @property
    def is_ours(self) -> bool:
        """Neither Redis nor one that KubeRay gives its command."""
        return self.name in ("router", "worker", "up", "controller")


class Release:
    """Everything that Helm would send to a cluster. `lint`: what it finds wrong besides."""

    def __init__(self, manifests: Mapping[str, str], lint: list[str]) -> None:
        self.notes = next(text for name, text in manifests.items() if name.endswith("NOTES.txt"))
        texts = [text for name, text in sorted(manifests.items()) if name.endswith(".yaml")]
        documents = (document for text in texts for document in yaml.load_all(text, _Strict))
        self.objects: list[Object] = [document for document in documents if document]
        self.lint = lint

    def of(self, kind: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, suffix: str) -> Object:
        """Return the only object of that kind with this suffix in its name."""
        found = [found for found in self.of(kind) if found["metadata"]["name"].endswith(suffix)]
        assert len(found) == 1, (kind, suffix, [each["metadata"]["name"] for each in found])
        return found[0]

    def workloads(self) -> list[Object]:
        """Return all objects with pods. Groups of a RayCluster are shown as the objects that KubeRay makes of them."""
        return [*self.of("Deployment"), *self.of("StatefulSet"), *self._ray_groups()]

    def _ray_groups(self) -> Iterator[Object]:
        for cluster in self.of("RayCluster"):
            for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
                labels = group["template"]["metadata"]["labels"]
                yield {
                    "kind": "RayGroup",
                    "metadata": {"name": group.get("groupName", "head"), "labels": labels},
                    "spec": {**group, "selector": {"matchLabels": labels}},
                }

    def containers(self) -> Iterator[Container]:
        for owner in self.workloads():
            pod = owner["spec"]["template"]["spec"]
            for spec in (*pod.get("initContainers", ()), *pod["containers"]):
                yield Container(owner, pod, spec)

    def config(self, suffix: str = "-config") -> dict[str, str]:
        """Files of a ConfigMap."""
        name = f"{self.prefix}{suffix}"
        return dict(next(each["data"] for each in self.of("ConfigMap") if each["metadata"]["name"] == name))

    @property
    def prefix(self) -> str:
        """Return the prefix of objects' names."""
        return str(self.one("Service", "-router")["metadata"]["name"]).removesuffix("-router")
