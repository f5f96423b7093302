"""The few calls of the Kubernetes API that a controller needs: pods are listed, watched and marked, scales are set, and
a RayCluster is read and changed.

Plain HTTP: it is seven calls, and the controller's image is the router's. Every answer is bounded in size and time. The
token is read anew for every call, as the kubelet replaces it.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from tandem.core.errors import ConfigError, ConflictError, NotFoundError, TandemError, UnavailableError

NAME: Final = "tandem-controller"
"""Field manager of the changes made here: Helm and kubectl name it for a scale that they would overwrite."""
TIMEOUT_S: Final = 5.0
WATCH_S: Final = 30
"""The server ends a watch after so long, and pods are listed anew."""
PAGE_PODS: Final = 250
MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
MAX_LINE_BYTES: Final = 4 * 1024 * 1024
"""Of one object in a watch; the API itself takes no object above 1.5 MiB."""
_MERGE: Final = "application/merge-patch+json"
_JSON_PATCH: Final = "application/json-patch+json"
Object = Mapping[str, Any]


class ExpiredError(Exception):
    """The version that was asked for is too old: list anew."""


@dataclass(frozen=True, slots=True)
class PodList:
    """All pods at one moment. `version`: where to start a watch."""

    pods: tuple[Object, ...]
    version: str


@dataclass(frozen=True, slots=True)
class PodChange:
    """A pod as it is now; `is_gone`: as it was last."""

    pod: Object
    is_gone: bool


@dataclass(frozen=True, slots=True)
class Scale:
    """Of a Deployment: how many pods are wanted. `version`: what it must still be for the next change."""

    replicas: int
    version: str


class KubernetesApi:
    """A client for one namespace; `async with` it.

    Raises UnavailableError when the API does not answer, refuses for now, or refuses us (its message states which),
    ConflictError when the object was changed concurrently, NotFoundError for a missing one.
    """

    def __init__(self, url: str, account: Path, namespace: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """`account`: the folder with `token` and `ca.crt` of the service account. ConfigError for one that is none."""
        self._account, self._timeout_s = account, timeout_s
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self._rayclusters = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters"
        self._client = httpx.AsyncClient(
            base_url=url,
            verify=_trust(account) if url.startswith("https:") else True,
            timeout=timeout_s,
            headers={"User-Agent": NAME},
            trust_env=False,
        )

    async def __aenter__(self) -> KubernetesApi:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def pods(self, selector: str) -> PodList:
        """Return the pods with matching labels, page by page; ExpiredError if that took too long."""
        found: list[Object] = []
        after = ""
        while True:
            page = {"labelSelector": selector, "limit": str(PAGE_PODS), **({"continue": after} if after else {})}
            answer = await self._ask("GET", self._pods, params=page)
            found += _objects(answer)
            about = _about(answer)
            after = str(about.get("continue") or "")
            if not after:
                return PodList(tuple(found), str(about.get("resourceVersion", "")))

    async def watch_pods(self, selector: str, version: str) -> AsyncIterator[PodChange]:
        """Yield every change after `version`, until the server ends the watch; ExpiredError if it knows that no
        more."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        patience = httpx.Timeout(self._timeout_s, read=WATCH_S + self._timeout_s)
        async with self._answer("GET", self._pods, params=query, patience=patience) as response:
            async for line in _lines(response):
                change = _decoded(line)
                kind, pod = change.get("type"), change.get("object")
                if not isinstance(pod, dict):
                    raise _not_understood("a change without an object")
                if kind == "ERROR":
                    _check(int(pod.get("code") or 500), str(pod.get("message", "")))
                elif kind in ("ADDED", "MODIFIED", "DELETED"):
                    yield PodChange(pod, is_gone=kind == "DELETED")

    async def patch_pod(self, name: str, *, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Object:
        """Set these; return the pod as it is then."""
        about = {"labels": dict(labels), "annotations": dict(annotations)}
        return await self._ask("PATCH", f"{self._pods}/{name}", body={"metadata": about})

    async def scale(self, deployment: str) -> Scale:
        """Return how many pods the Deployment is to have."""
        return _scale(await self._ask("GET", f"{self._deployments}/{deployment}/scale"))

    async def set_scale(self, deployment: str, replicas: int, *, version: str) -> Scale:
        """Set the number of pods, if the Deployment is still of that version."""
        wanted = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        return _scale(await self._ask("PATCH", f"{self._deployments}/{deployment}/scale", body=wanted))

    async def raycluster(self, name: str) -> Object:
        """Return the RayCluster of that name, as it is."""
        return await self._ask("GET", f"{self._rayclusters}/{name}")

    async def patch_raycluster(self, name: str, operations: Sequence[Object]) -> Object:
        """Change it by a JSON patch, all of it or nothing; ConflictError where one of its tests fails, too."""
        return await self._ask("PATCH", f"{self._rayclusters}/{name}", body=operations, media=_JSON_PATCH)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | Sequence[Object] | None = None,
        media: str = _MERGE,
    ) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        async with self._answer(method, path, params=params, content=content, media=media) as response:
            text = bytearray()
            async for part in _parts(response):
                text += part
                if len(text) > MAX_ANSWER_BYTES:
                    raise _not_understood(f"an answer above {MAX_ANSWER_BYTES} bytes")
            return _decoded(bytes(text))

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
        media: str = _MERGE,
        patience: httpx.Timeout | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Yield a good response; its body is still to be read."""
        kind = {"Content-Type": media} if content is not None else {}
        headers = {"Authorization": f"Bearer {self._token()}", **kind}
        request = self._client.build_request(
            method, path, params=params, content=content, headers=headers, timeout=patience or self._timeout_s
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _no_answer(error) from error
        try:
            if response.status_code != httpx.codes.OK:
                _check(response.status_code, await _message(response))
            yield response
        finally:
            await response.aclose()

    def _token(self) -> str:
        try:
            return (self._account / "token").read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise UnavailableError("the token of the service account cannot be read", why=str(error)) from error


def _trust(account: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise ConfigError(f"cannot use {account / 'ca.crt'}", why=error.strerror or str(error)) from error


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in response.aiter_bytes():
            yield part
    except httpx.HTTPError as error:
        raise _no_answer(error) from error


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield whole lines; an unfinished last one is left out."""
    rest = bytearray()
    async for part in _parts(response):
        rest += part
        *lines, last = rest.split(b"\n")
        for line in lines:
            if line:
                yield bytes(line)
        rest = bytearray(last)
        if len(rest) > MAX_LINE_BYTES:
            raise _not_understood(f"a line above {MAX_LINE_BYTES} bytes")


async def _message(response: httpx.Response) -> str:
    """Return the message of a refusal, in so far as it is short."""
    text = bytearray()
    async for part in _parts(response):
        text += part
        if len(text) > 64 * 1024:
            return ""
    try:
        status = json.loads(text)
    except ValueError:
        return ""
    return str(status.get("message", ""))[:400] if isinstance(status, dict) else ""


def _check(status: int, message: str) -> None:
    """Raise the error for this refusal."""
    why = f"{status} {message}".strip()
    if status == httpx.codes.GONE:
        raise ExpiredError(why)
    if status == httpx.codes.NOT_FOUND:
        raise NotFoundError("Kubernetes does not know it", why=why)
    if status == httpx.codes.CONFLICT:
        raise ConflictError("another writer changed it first", why=why)
    if status == httpx.codes.UNPROCESSABLE_ENTITY:
        raise ConflictError("the object has changed, or the change is not valid", why=why)
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        todo = "see that the controller's Role and RoleBinding are there"
        raise UnavailableError("the Kubernetes API refuses the controller", why=why, todo=todo)
    raise UnavailableError("the Kubernetes API refuses for now", why=why)


def _scale(answer: Object) -> Scale:
    try:
        return Scale(int(answer["spec"].get("replicas", 0)), str(answer["metadata"]["resourceVersion"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_understood("a scale without a number or a version") from error


def _objects(answer: Object) -> list[Object]:
    items = answer.get("items")
    items = [] if items is None else items  # as Go writes a list without elements
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _not_understood("a list without objects")
    return items


def _about(answer: Object) -> Object:
    about = answer.get("metadata")
    if not isinstance(about, dict):
        raise _not_understood("no metadata")
    return about


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise _not_understood(str(error)) from error
    if not isinstance(answer, dict):
        raise _not_understood("no object")
    return answer


def _no_answer(error: httpx.HTTPError) -> TandemError:
    return UnavailableError("the Kubernetes API does not answer", why=str(error) or type(error).__name__)


def _not_understood(why: str) -> TandemError:
    return UnavailableError("the answer of the Kubernetes API is not understood", why=why)
