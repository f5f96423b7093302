"""A small Kubernetes: the API for pods, scales and RayClusters, and pod creation and selection as by a ReplicaSet. Pods
run nothing here; a kubelet gives them a start and an end.

It is strict where the real one is: versions, conflicts, watches that have expired, tokens, content types.
"""

import asyncio
import copy
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.integration.deploy.threaded_server import ThreadedServer
from tools.waiting import wait_for

TOKEN = "token-of-the-controller"
COST = "controller.kubernetes.io/pod-deletion-cost"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
PODS = "/api/v1/namespaces/{namespace}/pods"
SCALE = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
RAYCLUSTER = "/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{name}"
Object = dict[str, Any]


class RefusedError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Cluster:
    """Pods and Deployments, and everything that happened to pods. Safe to use from several threads."""

    def __init__(self, namespace: str = "serving") -> None:
        self.namespace = namespace
        self.pods: dict[str, Object] = {}
        self.deployments: dict[str, Object] = {}
        self.rayclusters: dict[str, Object] = {}
        self.changed = threading.Condition()
        self.is_away = False
        """The API answers no request."""
        self.ended: list[str] = []
        """Pods that a ReplicaSet picked, in order."""
        self.writes: list[tuple[str, str]] = []
        """Changes made by clients: (pod or Deployment, its patch)."""
        self._history: list[tuple[int, str, Object]] = []
        self._forgotten = 0
        self._version = 100
        self._names = itertools.count()
        self._is_stopped = False

    # ---- what happens in it ----------------------------------------------------------------------------------------

    def add_deployment(self, name: str, replicas: int, template: Object) -> None:
        """`template`: metadata of its pods, with labels that identify them."""
        with self.changed:
            self.deployments[name] = {"version": self._next(), "replicas": replicas, "template": template}

    def scale_by_hand(self, name: str, replicas: int) -> None:
        """Scale as `kubectl scale` would."""
        with self.changed:
            self.deployments[name].update(replicas=replicas, version=self._next())

    def delete_pod(self, name: str) -> None:
        """Delete as `kubectl delete pod` would: the pod is ended, and gone when its kubelet confirms it."""
        with self.changed:
            if "deletionTimestamp" not in self.pods[name]["metadata"]:
                self.touch(name, lambda pod: pod["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))

    def put_raycluster(self, raycluster: Object) -> None:
        """Write it as its operator or a person does: as a whole, with a new version."""
        with self.changed:
            found = copy.deepcopy(raycluster)
            found["metadata"]["resourceVersion"] = str(self._next())
            self.rayclusters[found["metadata"]["name"]] = found

    def add_pod(self, name: str, labels: Object, status: Object) -> None:
        """Add a pod as an operator does."""
        with self.changed:
            about = {"name": name, "labels": labels, "resourceVersion": str(self._next())}
            self.pods[name] = {"metadata": about, "status": status, "owner": ""}
            self._note("ADDED", self.pods[name])

    def touch(self, name: str, change: Callable[[Object], None]) -> None:
        """Change a pod, as its kubelet or a controller does."""
        with self.changed:
            pod = copy.deepcopy(self.pods[name])
            change(pod)
            pod["metadata"]["resourceVersion"] = str(self._next())
            self.pods[name] = pod
            self._note("MODIFIED", pod)

    def remove_pod(self, name: str) -> None:
        """Remove a pod after its kubelet reported its end."""
        with self.changed:
            pod = copy.deepcopy(self.pods.pop(name))
            pod["metadata"]["resourceVersion"] = str(self._next())
            self._note("DELETED", pod)

    def forget(self) -> None:
        """Versions before now are too old to watch from, as after a compaction."""
        with self.changed:
            self._forgotten = self._version
            self.changed.notify_all()

    def live(self, deployment: str = "") -> list[str]:
        """Pods that are not being ended."""
        with self.changed:
            return sorted(
                name for name, pod in self.pods.items()
                if "deletionTimestamp" not in pod["metadata"] and pod["owner"].startswith(deployment)
            )  # fmt: skip

    def set_ready(self, name: str, *, is_ready: bool = True) -> None:
        condition = {"type": "Ready", "status": "True" if is_ready else "False", "at": time.monotonic()}
        self.touch(name, lambda pod: pod["status"].update(phase="Running", conditions=[condition]))

    def settle_replicas(self) -> None:
        """Make and pick pods until every Deployment has as many as it is to have."""
        with self.changed:
            for name, deployment in self.deployments.items():
                here = [pod for each in self.live(name) if (pod := self.pods[each])["owner"] == name]
                for _ in range(deployment["replicas"] - len(here)):
                    self._make(name, deployment["template"])
                for pod in sorted(here, key=_rank)[: max(0, len(here) - deployment["replicas"])]:
                    self.ended.append(pod["metadata"]["name"])
                    self.delete_pod(pod["metadata"]["name"])

    def keep_replicas(self) -> None:
        """`settle_replicas` whenever something changed, until `stop`."""
        with self.changed:
            while not self._is_stopped:
                self.settle_replicas()
                self.changed.wait(0.5)

    def stop(self) -> None:
        with self.changed:
            self._is_stopped = True
            self.changed.notify_all()

    # ---- what clients ask ------------------------------------------------------------------------------------------

    def listed(self, selector: str, limit: int, after: str) -> Object:
        with self.changed:
            names = [name for name in sorted(self.pods) if _fits(self.pods[name], selector) and name > after]
            page = names[:limit] if limit else names
            about = {"resourceVersion": str(self._version), **({"continue": page[-1]} if page != names else {})}
            return {"kind": "PodList", "metadata": about, "items": [_shown(self.pods[name]) for name in page]}

    def since(self, version: int, selector: str) -> list[tuple[int, str]]:
        """Lines of a watch."""
        with self.changed:
            if version < self._forgotten:
                raise RefusedError(410, "too old resource version")
            found = [entry for entry in self._history if entry[0] > version and _fits(entry[2], selector)]
            return [(at, json.dumps({"type": kind, "object": _shown(pod)})) for at, kind, pod in found]

    def patch(self, name: str, patch: Object) -> Object:
        with self.changed:
            if name not in self.pods:
                raise RefusedError(404, f'pods "{name}" not found')
            assert set(patch) == {"metadata"}, "the controller marks pods and changes nothing else"
            self.writes.append((name, json.dumps(patch)))
            self.touch(name, lambda pod: _merge(pod, patch))
            return _shown(self.pods[name])

    def scaled(self, name: str, patch: Object | None) -> Object:
        with self.changed:
            if name not in self.deployments:
                raise RefusedError(404, f'deployments.apps "{name}" not found')
            found = self.deployments[name]
            if patch is not None:
                version = patch.get("metadata", {}).get("resourceVersion")
                if version is not None and version != str(found["version"]):
                    raise RefusedError(
                        409, "the object has been modified; please apply your changes to the latest version"
                    )
                found.update(replicas=patch["spec"]["replicas"], version=self._next())
                self.writes.append((name, str(found["replicas"])))
            about = {"name": name, "resourceVersion": str(found["version"])}
            # Zero is left out of JSON, as in Go.
            spec = {"replicas": found["replicas"]} if found["replicas"] else {}
            return {"kind": "Scale", "metadata": about, "spec": spec, "status": {"replicas": len(self.live(name))}}

    def raycluster(self, name: str, operations: list[Object] | None) -> Object:
        with self.changed:
            if name not in self.rayclusters:
                raise RefusedError(404, f'rayclusters.ray.io "{name}" not found')
            if operations is not None:
                self.put_raycluster(_json_patched(self.rayclusters[name], operations))
                self.writes.append((name, json.dumps(operations)))
            return copy.deepcopy(self.rayclusters[name])

    def _make(self, deployment: str, template: Object) -> None:
        name = f"{deployment}-7d9f-{next(self._names):05d}"
        about = {**copy.deepcopy(template), "name": name, "resourceVersion": str(self._next())}
        pod = {"metadata": about, "status": {"phase": "Pending"}, "owner": deployment}
        self.pods[name] = pod
        self._note("ADDED", pod)

    def _note(self, kind: str, pod: Object) -> None:
        self._history.append((int(pod["metadata"]["resourceVersion"]), kind, pod))
        self.changed.notify_all()

    def _next(self) -> int:
        self._version += 1
        self.changed.notify_all()
        return self._version


def _rank(pod: Object) -> tuple[bool, bool, int, float]:
    """Order pods as a ReplicaSet picks: not started ones, then not ready ones, then by cost, then the newest."""
    ready = next((each for each in pod["status"].get("conditions", ()) if each["status"] == "True"), None)
    cost = int(pod["metadata"].get("annotations", {}).get(COST, "0"))
    return pod["status"]["phase"] != "Pending", ready is not None, cost, -(ready or {"at": 0.0})["at"]


def _fits(pod: Object, selector: str) -> bool:
    labels = pod["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, _, value in (part.partition("=") for part in selector.split(",")))


def _shown(pod: Object) -> Object:
    return {"kind": "Pod", **{key: value for key, value in pod.items() if key != "owner"}}


def _merge(target: Object, patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _json_patched(target: Object, operations: list[Object]) -> Object:
    """Tests, and what is set in objects; any other operation is none that is used here."""
    found = copy.deepcopy(target)
    for operation in operations:
        *path, last = operation["path"].lstrip("/").split("/")
        at: Any = found
        for step in path:
            at = at[int(step)] if isinstance(at, list) else at[step]
        if operation["op"] == "test":
            if at.get(last) != operation["value"]:
                raise RefusedError(422, f"the test of {operation['path']} failed")
        else:
            assert operation["op"] == "add", operation
            at[last] = operation["value"]
    return found


class Api(ThreadedServer):
    """The HTTP side of a cluster, on a port of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        routes = [
            Route(PODS, self._list),
            Route(f"{PODS}/{{name}}", self._patch, methods=["PATCH"]),
            Route(SCALE, self._scale, methods=["GET", "PATCH"]),
            Route(RAYCLUSTER, self._raycluster, methods=["GET", "PATCH"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off", ws="none")
        super().__init__(config)

    async def _list(self, request: Request) -> Response:
        return await self._answered(request, self._listed)

    async def _listed(self, request: Request) -> Response:
        query = request.query_params
        selector = query["labelSelector"]
        if "watch" not in query:
            limit = int(query.get("limit", "0"))
            return JSONResponse(self._cluster.listed(selector, limit, query.get("continue", "")))
        version = int(query["resourceVersion"])
        self._cluster.since(version, selector)
        seconds = float(query["timeoutSeconds"])
        return StreamingResponse(self._watched(version, selector, seconds), media_type="application/json")

    async def _watched(self, version: int, selector: str, seconds: float) -> AsyncIterator[bytes]:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s and not self._cluster.is_away and not self._server.should_exit:
            try:
                lines = self._cluster.since(version, selector)
            except RefusedError as refusal:
                status = {"kind": "Status", "code": refusal.code, "message": refusal.message}
                yield json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
                return
            for at, line in lines:
                version = at
                yield line.encode() + b"\n"
            await asyncio.sleep(0.02)

    async def _patch(self, request: Request) -> Response:
        async def patched(request: Request) -> Response:
            return JSONResponse(self._cluster.patch(request.path_params["name"], await request.json()))

        return await self._answered(request, patched)

    async def _scale(self, request: Request) -> Response:
        async def scaled(request: Request) -> Response:
            patch = await request.json() if request.method == "PATCH" else None
            return JSONResponse(self._cluster.scaled(request.path_params["name"], patch))

        return await self._answered(request, scaled)

    async def _raycluster(self, request: Request) -> Response:
        async def answered(request: Request) -> Response:
            patch = await request.json() if request.method == "PATCH" else None
            return JSONResponse(self._cluster.raycluster(request.path_params["name"], patch))

        return await self._answered(request, answered, patch=JSON_PATCH)

    async def _answered(self, request: Request, answer: Callable[[Request], Any], *, patch: str = MERGE) -> Response:
        """Refuse as the real one does: while it is away, without its token, for another namespace or another patch."""
        try:
            if self._cluster.is_away:
                raise RefusedError(503, "the server is currently unable to handle the request")
            if request.headers.get("authorization") != f"Bearer {TOKEN}":
                raise RefusedError(401, "Unauthorized")
            if request.path_params["namespace"] != self._cluster.namespace:
                raise RefusedError(403, "forbidden")
            if request.method == "PATCH" and request.headers.get("content-type") != patch:
                raise RefusedError(415, "the body of the request was in an unknown format")
            found = await answer(request)
            assert isinstance(found, Response)
            return found
        except RefusedError as refusal:
            status = {"kind": "Status", "code": refusal.code, "message": refusal.message}
            return JSONResponse(status, status_code=refusal.code)


@contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    """The address of its API, while the block runs; ReplicaSets are kept meanwhile."""
    api = Api(cluster)
    threads = [threading.Thread(target=run) for run in (api.run, cluster.keep_replicas)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: api.is_started)
        yield api.url
    finally:
        cluster.stop()
        api.stop()
        for thread in threads:
            thread.join(30)
