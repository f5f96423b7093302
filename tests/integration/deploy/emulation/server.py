"""The HTTP side of an emulated API server, as used by Helm's client, kubectl's habits and the chart's controller.

It reads, lists, watches, creates, replaces, patches and deletes objects of all kinds that it knows, holds them against
Kubernetes' schemas before it takes them, and refuses clients without the right."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.integration.deploy.emulation import access
from tests.integration.deploy.emulation.fields import merged
from tests.integration.deploy.emulation.resources import (
    ALL,
    BY_PATH,
    NAMESPACES,
    RAYCLUSTERS,
    SCALED,
    Object,
    RefusedError,
    Resource,
    missing,
)
from tests.integration.deploy.emulation.store import Store, fits, parsed
from tests.integration.deploy.threaded_server import ThreadedServer

SCHEMAS = "1.33"
"""The version of Kubernetes that this is one of."""
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_CHECKED = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("fieldValidation", "dryRun")]


def discovered(path: str) -> Object | None:
    """The document at that path; None if it is none of these."""
    words = path.strip("/")
    prefixes = {each.prefix for each in ALL}
    if words == "version":
        major, minor = SCHEMAS.split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{SCHEMAS}.0"}
    if words == "api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if words == "apis":
        groups = sorted({(each.group, each.version) for each in ALL if each.group})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*each) for each in groups]}
    if words in prefixes:
        here = [each for each in ALL if each.prefix == words]
        return _listed(here)
    if words == "openapi/v3":
        return {"paths": {prefix: {"serverRelativeURL": f"/openapi/v3/{prefix}"} for prefix in sorted(prefixes)}}
    if words.removeprefix("openapi/v3/") in prefixes:
        return _openapi([each for each in ALL if each.prefix == words.removeprefix("openapi/v3/")])
    return None


def _group(group: str, version: str) -> Object:
    found = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [found], "preferredVersion": found}


def _listed(here: list[Resource]) -> Object:
    resources = []
    for each in here:
        about = {"singularName": each.kind.lower(), "namespaced": each.is_namespaced}
        resources.append({"name": each.plural, "kind": each.kind, "verbs": _VERBS, **about})
        if each in SCALED:
            scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get", "patch", "update"]}
            resources.append({"name": f"{each.plural}/scale", **about, **scale})
    version = here[0].group_version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _openapi(here: list[Resource]) -> Object:
    """Return as much of the document as a client reads to see that it may leave the checking of fields to the
    server."""
    paths = {}
    for each in here:
        kind = {"group": each.group, "version": each.version, "kind": each.kind}
        patch = {"parameters": _CHECKED, "responses": {}, "x-kubernetes-group-version-kind": kind}
        paths[each.path("{namespace}", "{name}")] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": SCHEMAS}, "paths": paths}


# Secrets as Helm sends them, in binary form; field numbers are those of `k8s.io/api/core/v1` and `meta/v1`.
CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NAME, _NAMESPACE, _VERSION, _LABELS, _ANNOTATIONS = 1, 3, 6, 11, 12


def decoded(body: bytes) -> Object:
    """A Secret, or only its kind for what asks for nothing else. RefusedError for other kinds."""
    if not body.startswith(_MAGIC):
        raise RefusedError(400, "BadRequest", "the body does not begin as it has to")
    envelope = dict(_fields(body[len(_MAGIC) :]))
    about = dict(_fields(envelope[1]))
    kind = about.get(2, b"").decode()
    if kind == "DeleteOptions":
        return {"kind": kind}
    if kind != "Secret":
        raise RefusedError(415, "UnsupportedMediaType", f"no {kind} is known here in this form")
    return _secret(envelope.get(2, b""))


def _secret(body: bytes) -> Object:
    found: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {}}
    for number, value in _fields(body):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif number == 2:
            key, content = _entry(value)
            found["data"][key] = base64.b64encode(content).decode()
        elif number == 3:
            found["type"] = value.decode()
        else:
            raise RefusedError(415, "UnsupportedMediaType", f"field {number} of a Secret is not known here")
    return found


def _metadata(body: bytes) -> Object:
    found: Object = {}
    names = {_NAME: "name", _NAMESPACE: "namespace", _VERSION: "resourceVersion"}
    maps = {_LABELS: "labels", _ANNOTATIONS: "annotations"}
    for number, value in _fields(body):
        if number in names and value:
            found[names[number]] = value.decode()
        elif number in maps:
            key, text = _entry(value)
            found.setdefault(maps[number], {})[key] = text.decode()
    return found


def _entry(body: bytes) -> tuple[str, bytes]:
    """Parse one entry of a map."""
    found = dict(_fields(body))
    return found.get(1, b"").decode(), found.get(2, b"")


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of what has a length; what has none is of no interest here."""
    at = 0
    while at < len(body):
        tag, at = _varint(body, at)
        number, form = tag >> 3, tag & 7
        if form == _VARINT:
            _, at = _varint(body, at)
        elif form == _BYTES:
            size, at = _varint(body, at)
            yield number, body[at : at + size]
            at += size
        elif form in (_FIXED64, _FIXED32):
            at += 8 if form == _FIXED64 else 4
        else:
            raise RefusedError(400, "BadRequest", "the body is not understood")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


CERTIFICATE = Path(__file__).parents[2] / "router" / "tls" / "cert.pem"
"""Of 127.0.0.1, and its own authority: Helm sends its token only to a server with one."""
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_WATCH_S = 300.0
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a path. `name` "" = all of them; `below`: a part of one, such as `scale`."""

    resource: Resource
    namespace: str
    name: str
    below: str

    @staticmethod
    def of(path: str) -> Target:
        """RefusedError for what this server does not know."""
        words = path.strip("/").split("/")
        prefix, rest = "/".join(words[: 2 if words[0] == "api" else 3]), words[2 if words[0] == "api" else 3 :]
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces" and (prefix, rest[2]) in BY_PATH:
            namespace, rest = rest[1], rest[2:]
        resource = BY_PATH.get((prefix, rest[0] if rest else ""))
        if resource is None or len(rest) > 3:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")
        return Target(resource, namespace, *[*rest[1:], "", ""][:2])


class Api(ThreadedServer):
    """A server over a store, on a port of its own. While `is_away` it answers no request."""

    def __init__(self, store: Store) -> None:
        self._store, self.is_away = store, False
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=_METHODS)])
        config = uvicorn.Config(
            app,
            port=0,
            log_level="error",
            lifespan="off",
            ws="none",
            ssl_certfile=CERTIFICATE,
            ssl_keyfile=CERTIFICATE.with_name("key.pem"),
        )
        super().__init__(config)

    async def _answer(self, request: Request) -> Response:
        try:
            if self.is_away:
                raise RefusedError(503, "ServiceUnavailable", "the server is currently unable to handle the request")
            document = discovered(request.url.path)
            if document is not None:
                return JSONResponse(document)
            target = Target.of(request.url.path)
            is_watched = request.query_params.get("watch", "") in ("true", "1")
            access.check(
                self._store, request.headers.get("authorization", ""), _verb(request.method, target, is_watched),
                target.resource, target.namespace, target.name, target.below,
            )  # fmt: skip
            if is_watched:
                return self._watch(request, target)
            body = await request.body()
            found, code = await run_in_threadpool(self._done, request, target, body)
            return JSONResponse(found, status_code=code)
        except RefusedError as refusal:
            return JSONResponse(refusal.status, status_code=refusal.code)

    def _done(self, request: Request, target: Target, body: bytes) -> tuple[Object, int]:
        form = request.headers.get("content-type", "").partition(";")[0]
        with self._store.changed:
            if request.method == "GET":
                return self._got(request, target), 200
            if request.method == "DELETE":
                return self._deleted(target, _parsed(body, form) if body else {}), 200
            wanted = _parsed(body, form)
            by = request.query_params.get("fieldManager") or request.headers.get("user-agent", "").partition("/")[0]
            if target.below == "scale":
                return self._scaled(target, wanted, by), 200
            if target.below:
                raise RefusedError(404, "NotFound", f"{target.below} of {target.resource.plural} is not known here")
            if request.method == "POST":
                return self._store.create(target.resource, _checked(target, wanted), by), 201
            if request.method == "PUT":
                return self._replaced(target, wanted, by), 200
            if form == APPLY:
                is_forced = request.query_params.get("force") == "true"
                return self._applied(target, wanted, by, is_forced=is_forced)
            if form == MERGE:
                found = self._store.get(target.resource, target.namespace, target.name)
                _same_version(found, wanted)
                return self._store.change(target.resource, found, lambda live: merged(live, wanted), by), 200
            raise RefusedError(415, "UnsupportedMediaType", f"no patches of the form {form} are taken here")

    def _got(self, request: Request, target: Target) -> Object:
        if not target.name:
            items = [_shown(target.resource, each) for each in self._listed(request, target)]
            kind = f"{target.resource.kind}List"
            about = {"resourceVersion": str(self._store.version)}
            return {"kind": kind, "apiVersion": target.resource.group_version, "metadata": about, "items": items}
        found = self._store.get(target.resource, target.namespace, target.name)
        return _scale(found) if target.below == "scale" else _shown(target.resource, found)

    def _listed(self, request: Request, target: Target) -> list[Object]:
        is_wanted = _wanted(request, target)
        return [each for each in self._store.all(target.resource) if is_wanted(each)]

    def _deleted(self, target: Target, options: Object) -> Object:
        found = self._store.get(target.resource, target.namespace, target.name)
        self._store.delete(target.resource, found, grace_s=options.get("gracePeriodSeconds"))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _replaced(self, target: Target, wanted: Object, by: str) -> Object:
        found = self._store.get(target.resource, target.namespace, target.name)
        _same_version(found, wanted)
        kept = {key: found["metadata"][key] for key in ("uid", "creationTimestamp", "generation", "resourceVersion")}
        checked = _checked(target, wanted)
        after = {**checked, "metadata": {**checked["metadata"], **kept}}
        return self._store.change(target.resource, found, lambda _: after, by)

    def _applied(self, target: Target, wanted: Object, by: str, *, is_forced: bool) -> tuple[Object, int]:
        checked = _checked(target, wanted)
        found = self._store.find(target.resource, target.namespace, target.name)
        if found is None:
            return self._store.create(target.resource, checked, by), 201
        owners = self._store.owners[found["metadata"]["uid"]]
        after = owners.applied(found, checked, by, is_forced=is_forced)
        return self._store.change(target.resource, found, lambda _: after), 200

    def _scaled(self, target: Target, wanted: Object, by: str) -> Object:
        found = self._store.get(target.resource, target.namespace, target.name)
        if target.resource not in SCALED:
            raise missing(target.resource, f"{target.name}/scale")
        _same_version(found, wanted)
        replicas = int(wanted["spec"].get("replicas", 0))
        return _scale(
            self._store.change(
                target.resource, found, lambda live: {**live, "spec": {**live["spec"], "replicas": replicas}}, by
            )
        )

    def _watch(self, request: Request, target: Target) -> Response:
        query = request.query_params
        if query.get("sendInitialEvents"):
            why = "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless it is switched on"
            raise RefusedError(422, "Invalid", why)
        version = int(query.get("resourceVersion") or self._store.version)
        ends_s = time.monotonic() + float(query.get("timeoutSeconds", _WATCH_S))
        lines = self._watched(target.resource, _wanted(request, target), version, ends_s)
        return StreamingResponse(lines, media_type="application/json")

    async def _watched(
        self, resource: Resource, is_wanted: Callable[[Object], bool], version: int, ends_s: float
    ) -> AsyncIterator[bytes]:
        while time.monotonic() < ends_s and not self.is_away and not self._server.should_exit:
            for change in self._store.since(version):
                version = change.version
                if change.resource == resource and is_wanted(change.after):
                    line = {"type": change.kind, "object": _shown(resource, change.after)}
                    yield json.dumps(line).encode() + b"\n"
            await asyncio.sleep(_LOOK_S)


def _verb(method: str, target: Target, is_watched: bool) -> str:
    if method == "GET":
        return "watch" if is_watched else "get" if target.name else "list"
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]


def _wanted(request: Request, target: Target) -> Callable[[Object], bool]:
    """Return the filter of lists and watches: by namespace, labels and fields."""
    query = request.query_params
    labels, fields = parsed(query.get("labelSelector", "")), parsed(query.get("fieldSelector", ""))

    def is_wanted(found: Object) -> bool:
        about = {"labels": {f"metadata.{key}": value for key, value in found["metadata"].items()}}
        is_here = target.namespace in ("", found["metadata"].get("namespace", ""))
        is_named = target.name in ("", found["metadata"]["name"])
        return is_here and is_named and fits(found, labels) and fits({"metadata": about}, fields)

    return is_wanted


def _parsed(body: bytes, form: str) -> Object:
    if form == CONTENT_TYPE:
        return decoded(body)
    found: Any = yaml.safe_load(body) if form == APPLY and not body.startswith(b"{") else json.loads(body)
    if not isinstance(found, dict):
        raise RefusedError(400, "BadRequest", "the body is no object")
    return found


def _checked(target: Target, wanted: Object) -> Object:
    """Check it against Kubernetes' schemas, at the place that the path names; no other field is taken."""
    resource, about = target.resource, dict(wanted.get("metadata", {}))
    if resource != NAMESPACES:
        about.setdefault("namespace", target.namespace)
    if target.name:
        about.setdefault("name", target.name)
    about.pop("managedFields", None)
    about.pop("creationTimestamp", None)
    found = {**wanted, "apiVersion": resource.group_version, "kind": resource.kind, "metadata": about}
    if about.get("namespace", "") != target.namespace or (target.name and about["name"] != target.name):
        raise RefusedError(400, "BadRequest", "the object does not belong where it was sent")
    if resource == RAYCLUSTERS:
        return found  # its own schema is test_rendering's
    try:
        kubernetes_validate.validate(found, SCHEMAS, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(step) for step in error.path)
        raise RefusedError(422, "Invalid", f"{resource.kind} {where}: {error.message}") from error
    return found


def _same_version(found: Object, wanted: Object) -> None:
    version = wanted.get("metadata", {}).get("resourceVersion")
    if version not in (None, "", found["metadata"]["resourceVersion"]):
        why = "the object has been modified; please apply your changes to the latest version and try again"
        raise RefusedError(409, "Conflict", why)


def _shown(resource: Resource, found: Object) -> Object:
    return {"apiVersion": resource.group_version, "kind": resource.kind, **found}


def _scale(found: Object) -> Object:
    """Zero is left out of JSON, as in Go."""
    replicas = found["spec"]["replicas"]
    about = {key: found["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": about,
        "spec": {"replicas": replicas} if replicas else {},
        "status": {"replicas": found.get("status", {}).get("replicas", 0)},
    }
