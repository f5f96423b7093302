"""The admin port of a router of several processes: it asks their admin ports, and joins their answers.

Every process checks the admin key by itself. The routing policy and SLO classes are sent to all of them, and again to
one that starts later; metrics, requests and status are added up; everything else any one of them can answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.core import metric_names as names
from tandem.core.clock import MonotonicClock
from tandem.core.errors import StartupError, TandemError, UnavailableError
from tandem.router.admin.app import (
    DESIRED_PATH,
    FIGURES_PATH,
    LIVE_PATH,
    POLICY_PATH,
    SLO_PATH,
    TRACE_PATH,
    TRACES_PATH,
    body_limit,
    check_form,
)
from tandem.router.admin.page import timeseries
from tandem.router.admin.page.chat import CHAT_PATH, CUT_OFF, ApiRelay, HttpExchange
from tandem.router.admin.page.live_events import LiveEvents, Read, trimmed
from tandem.router.admin.page.static_files import site_routes
from tandem.router.admin.status import workers_of
from tandem.router.admin.trace_handlers import MAX_SHOWN
from tandem.router.admission import status as admission_status
from tandem.router.api.http.body_parser import read_body
from tandem.router.api.http.errors import error_response

ANSWER_S = 10.0
TOGETHER_S = 3.0
"""Time that a process has to answer a question to all: clients that ask for metrics do not wait much longer
themselves."""
_MAX_ANSWER_BYTES = 64 << 20
_OF_WORKERS = "worker"
"""A metric with this label was reported by a worker: it is the same in every process."""
_LEAST = frozenset({names.WORKER_UP, names.RETRY_BUDGET})
_MOST = frozenset(
    {names.WORKER_REGISTERED, names.BREAKER, names.INDEX_BLOCKS}
    | {one for one in names.CATALOGUE.values() if one.source is names.MetricSource.CLUSTER}
)
"""Metrics that all processes have alike, and per-process ones that no sum can express: the one that is worst off
counts."""
_TO_ALL = (POLICY_PATH, SLO_PATH)


class ReplicatedSettings:
    """The last body that was accepted for the routing policy and for each SLO class, for processes that start later.

    Hold `lock` while passing an order on, or replaying orders to a process that starts: else a process could miss an
    order that comes between its replay and its being asked.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._bodies: dict[tuple[str, str], bytes] = {}

    def keep(self, path: str, body: bytes) -> None:
        """A process accepted this."""
        key = path, (str(orjson.loads(body)["slo"]) if path == SLO_PATH else "")
        self._bodies[key] = body

    def every(self) -> list[tuple[str, bytes]]:
        """Paths and bodies; one for each thing that was changed."""
        return [(path, body) for (path, _), body in self._bodies.items()]


@dataclass(frozen=True, slots=True)
class RouterMember:
    """A process that listens, and the URL of its admin port."""

    name: str
    admin: str
    pid: int


@dataclass(frozen=True, slots=True)
class _Question:
    """A request to a process; `target`: its path and query."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class _Responses:
    """Answers of the processes of `router`, with the admin port `port`, and the error of each that gave none."""

    router: str
    port: int
    answers: Mapping[RouterMember, _HttpAnswer]
    silent: Mapping[RouterMember, TandemError]


@dataclass(frozen=True, slots=True)
class _HttpAnswer:
    status: int
    kind: str
    body: bytes

    @property
    def is_good(self) -> bool:
        return self.status == 200

    def response(self) -> Response:
        return Response(self.body, status_code=self.status, headers={"content-type": self.kind})


def create_parts_admin(
    router: str,
    port: int,
    parts: Callable[[], Sequence[RouterMember]],
    orders: ReplicatedSettings,
    *,
    admin_key: bytes,
    max_body_bytes: int,
    api: ApiRelay | None = None,
) -> Starlette:
    """The application; `parts` are the processes that can be asked now, `orders` keeps the settings sent to all. A
    request without a key is not read to the end. `api` None = no chat. Its `state.live` is the desk of the page's
    streams."""
    live = LiveEvents(_sections(router, port, parts, admin_key), MonotonicClock(), read_s=TOGETHER_S + 1)

    async def run(request: Request) -> Response:
        try:
            path, body = str(request.scope["path"]), b""  # not of request.url, which a strange Host makes unreadable
            if request.method == "POST":
                check_form(request.headers.get("authorization", ""), admin_key)
                body = await read_body(request, body_limit(path, max_body_bytes))
            question = _Question(request.method, _target(request), _headers(request), body)
            if request.method == "POST" and path in _TO_ALL:
                return await _tell_all(question, path, parts, orders)
            return await _ask(question, path, router, port, _some_of(parts()))
        except TandemError as error:
            return error_response(error)

    def admitting(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def run(request: Request) -> Response:
            try:  # a process checks the key
                question = _Question("GET", POLICY_PATH, {"authorization": request.headers.get("authorization", "")})
                admitted = await _fetch(_some_of(parts())[0], question)
                return await endpoint(request) if admitted.is_good else admitted.response()
            except TandemError as error:
                return error_response(error)

        return run

    async def stream(request: Request) -> Response:
        return live.open()

    routes = [
        *site_routes(),
        Route(LIVE_PATH, admitting(stream), methods=["GET"]),
        *([Route(CHAT_PATH, admitting(api.chat), methods=["POST"])] if api is not None else []),
        Route("/{path:path}", run, methods=["GET", "POST", "DELETE"]),
    ]
    app = Starlette(routes=routes)
    app.state.live = live
    return app


async def replay(orders: ReplicatedSettings, part: RouterMember, key: bytes) -> None:
    """Send a starting process all settings of the others; StartupError if it does not take it. `key`: admin's."""
    headers = {"authorization": f"Bearer {key.decode()}", "content-type": "application/json"}
    for path, body in orders.every():
        answer = await _fetch(part, _Question("POST", path, headers, body))
        if not answer.is_good:
            why = f"it answered {answer.status} to {path}"
            raise StartupError(f"process {part.name} refused the settings of the other processes", why=why,
                               todo="look at its log")  # fmt: skip


async def whole_scrape(parent: str) -> bytes:
    """Metrics of all processes, from their parent's admin port; `parent` is its URL. UnavailableError if it gives
    none."""
    answer = await _fetch(RouterMember("the parent", parent, 0), _Question("GET", "/metrics", {}))
    if not answer.is_good:
        raise UnavailableError("the processes of this router did not send their metrics", todo="ask again")
    return answer.body


async def _tell_all(
    question: _Question, path: str, parts: Callable[[], Sequence[RouterMember]], orders: ReplicatedSettings
) -> Response:
    """Kept once any process accepts it: one that does not answer now, or starts later, is to agree with that one."""
    async with orders.lock:
        every = _some_of(parts())
        told = await asyncio.gather(*(_fetch(part, question) for part in every), return_exceptions=True)
        if any(isinstance(one, _HttpAnswer) and one.is_good for one in told):
            orders.keep(path, question.body)
    answers: list[_HttpAnswer] = []
    for one in told:
        if isinstance(one, BaseException):
            raise one
        answers.append(one)
    return next((answer for answer in answers if not answer.is_good), answers[0]).response()


async def _ask(question: _Question, path: str, router: str, port: int, parts: Sequence[RouterMember]) -> Response:
    together = _TOGETHER.get(path)
    if together is None and not path.startswith(TRACE_PATH):
        return (await _fetch(parts[0], question)).response()
    told = await asyncio.gather(*(_fetch(part, question, TOGETHER_S) for part in parts), return_exceptions=True)
    answers: dict[RouterMember, _HttpAnswer] = {}
    silent: dict[RouterMember, TandemError] = {}
    for part, one in zip(parts, told, strict=True):
        if isinstance(one, _HttpAnswer):
            answers[part] = one
        elif isinstance(one, TandemError):
            silent[part] = one
        else:
            raise one
    if not answers:
        raise next(iter(silent.values()))
    if together is None:  # one process has it, if any has
        return next((one for one in answers.values() if one.is_good), next(iter(answers.values()))).response()
    bad = next((answer for answer in answers.values() if not answer.is_good), None)
    if bad is not None:
        return bad.response()
    kind = next(iter(answers.values())).kind
    return Response(together(_Responses(router, port, answers, silent)), headers={"content-type": kind})


def _sections(router: str, port: int, parts: Callable[[], Sequence[RouterMember]], key: bytes) -> dict[str, Read]:
    """Sections of the page, joined over all processes; asked with the admin key."""

    def asking(path: str) -> Read:
        async def read() -> Any:
            headers = {"authorization": f"Bearer {key.decode()}"}
            answer = await _ask(_Question("GET", path, headers), path, router, port, _some_of(parts()))
            body = orjson.loads(answer.body)
            if answer.status_code != 200:
                raise UnavailableError(str(body["error"]["message"]))
            return body

        return read

    async def status() -> Any:
        return trimmed(await asking("/admin/v1/status")())

    async def slots() -> Any:
        return timeseries.curves(await asking(FIGURES_PATH)())

    paths = {
        "links": "/admin/v1/net",
        "desired": DESIRED_PATH,
        "plan": "/admin/v1/plan",
        "events": "/admin/v1/events",
        "requests": TRACES_PATH,
    }
    return {"status": status, "figures": slots, **{name: asking(path) for name, path in paths.items()}}


def _some_of(parts: Sequence[RouterMember]) -> Sequence[RouterMember]:
    if not parts:
        raise UnavailableError("no process of this router listens", todo="try again; look at its log if that goes on")
    return parts


def _target(request: Request) -> str:
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else str(path)


def _headers(request: Request) -> dict[str, str]:
    """Headers that are passed on: the credentials, and the body's type."""
    return {name: value for name in ("authorization", "content-type") if (value := request.headers.get(name))}


# ---- putting together ---------------------------------------------------------------------------------------------


def _requests(told: _Responses) -> bytes:
    rows = [row for answer in told.answers.values() for row in orjson.loads(answer.body)["requests"]]
    return orjson.dumps({"requests": sorted(rows, key=lambda row: -row["age_s"])})


def _traces(told: _Responses) -> bytes:
    rows = [row for answer in told.answers.values() for row in orjson.loads(answer.body)["requests"]]
    return orjson.dumps({"requests": sorted(rows, key=lambda row: -row["began_at_s"])[:MAX_SHOWN]})


def _figures(told: _Responses) -> bytes:
    return orjson.dumps(timeseries.added_up([orjson.loads(answer.body) for answer in told.answers.values()]))


def _status(told: _Responses) -> bytes:
    said: dict[RouterMember, dict[str, Any]] = {
        part: orjson.loads(answer.body) for part, answer in told.answers.items()
    }
    pages = list(said.values())
    status = next((page for page in pages if not page["is_ready"]), pages[0])
    status["workers"] = workers_of(pages)
    status["admission"] = admission_status.added_up([page["admission"] for page in pages])
    processes = [
        {"id": part.name, "is_ready": page["is_ready"], **_some(page["router"], "incarnation", "in_flight", "pid")}
        for part, page in said.items()
    ]
    processes += [
        {"id": part.name, "is_ready": False, "pid": part.pid, "trouble": error.message}
        for part, error in told.silent.items()
    ]
    status["router"] |= {
        "id": told.router,
        "admin": told.port,
        "pid": os.getpid(),
        "in_flight": sum(page["router"]["in_flight"] for page in pages),
        "processes": sorted(processes, key=lambda process: process["id"]),
    }
    return orjson.dumps(status)


def _some(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _metrics(told: _Responses) -> bytes:
    added = added_up([answer.body.decode() for answer in told.answers.values()])
    up = GaugeMetricFamily(names.ROUTER_PROCESS_UP, names.ROUTER_PROCESS_UP.text, labels=["process"])
    for part in (*told.answers, *told.silent):
        up.add_metric([part.name], part in told.answers)
    added.append(up)

    class Added(Collector):
        def collect(self) -> list[Metric]:
            return added

    return generate_latest(Added())


_TOGETHER: Mapping[str, Callable[[_Responses], bytes]] = {
    "/metrics": _metrics,
    "/admin/v1/requests": _requests,
    "/admin/v1/status": _status,
    TRACES_PATH: _traces,
    FIGURES_PATH: _figures,
}


def added_up(texts: Sequence[str]) -> list[Metric]:
    """Metrics of several processes as those of one: samples with equal names and labels are added, except workers'
    reports, which all processes have alike, and the metrics that _LEAST and _MOST name."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if key not in known:
                    known[key] = sample.value
                elif sample.name in _MOST:
                    known[key] = max(known[key], sample.value)
                elif sample.name in _LEAST:
                    known[key] = min(known[key], sample.value)
                elif _OF_WORKERS not in sample.labels and not sample.name.endswith("_created"):
                    known[key] += sample.value
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    return list(families.values())


# ---- asking -------------------------------------------------------------------------------------------------------


async def _fetch(part: RouterMember, question: _Question, timeout_s: float = ANSWER_S) -> _HttpAnswer:
    """UnavailableError when there is no answer."""
    url = urlsplit(part.admin)
    try:
        async with asyncio.timeout(timeout_s):
            exchange = HttpExchange(*await asyncio.open_connection(url.hostname, url.port))
            try:
                await exchange.begin(question.method, question.target, url.netloc, question.headers, question.body)
                body = await exchange.whole(_MAX_ANSWER_BYTES)
            finally:
                exchange.close()
    except CUT_OFF as error:
        why = f"{type(error).__name__}: {error}"
        raise UnavailableError(
            f"process {part.name} of this router does not answer", why=why, todo="ask again"
        ) from error
    return _HttpAnswer(exchange.status, exchange.headers.get("content-type", "application/json"), body)
