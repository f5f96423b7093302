"""The admin port: status, requests, links, routing, audits, keys, SLO classes, the desired state, the wish to stop; a
key guards all but metrics."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.core.api_keys import Scope, id_of
from tandem.core.errors import AuthError, ConfigError, InternalError, InvalidRequestError, TandemError
from tandem.router.admin.api_keys import Keyring, NewKey
from tandem.router.admin.kv_audit_handlers import MAX_HOLDS, AuditHandlers
from tandem.router.admin.page.chat import CHAT_PATH, ApiRelay
from tandem.router.admin.page.live_events import LiveEvents, trimmed
from tandem.router.admin.page.static_files import site_routes
from tandem.router.admin.page.timeseries import TimeSeries, curves
from tandem.router.admin.routing_handlers import RoutingHandlers
from tandem.router.admin.scaling_handlers import NewState, NewWish, ScalingHandlers
from tandem.router.admin.slo_handlers import NewSlo, SloHandlers
from tandem.router.admin.status import StatusPage, net
from tandem.router.admin.trace_handlers import TraceHandlers
from tandem.router.api.http.body_parser import read_body, read_json
from tandem.router.api.http.errors import error_response
from tandem.router.error_quoting import shortened
from tandem.router.metrics.router import CONTENT_TYPE, Metrics
from tandem.router.tenancy.authenticator import Authenticator
from tandem.router.workers.table import WorkerTable

_log = logging.getLogger(__name__)
_MIN_KEY_BYTES = 16
_MAX_BODY_BYTES = 64 * 1024
_REPAIR_BYTES = MAX_HOLDS * 1024
_DESIRED_BYTES = 8 * 1024 * 1024
_EVENTS = 50
TRACE_PATH = "/admin/v1/requests/"
POLICY_PATH, SLO_PATH = "/admin/v1/route/policy", "/admin/v1/slo"
EXPLAIN_PATH, REPAIR_PATH = "/admin/v1/route/explain", "/admin/v1/kv/repair"
DESIRED_PATH = "/admin/v1/desired"
LIVE_PATH, TRACES_PATH, FIGURES_PATH = "/admin/v1/live", "/admin/v1/traces", "/admin/v1/figures"
OnDown = Callable[[], Awaitable[None]]
Endpoint = Callable[[Request], Awaitable[Response]]
Read = Callable[[], object]
"""Returns plain values, or a coroutine of such."""


def load_key(path: Path) -> bytes:
    """The admin key in a file; ConfigError if it is missing or too short to guess against."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the admin key {path}", why=str(error), todo="check the path") from error
    if len(key) < _MIN_KEY_BYTES:
        raise ConfigError(f"the admin key {path} is too short", why=f"at least {_MIN_KEY_BYTES} bytes are needed")
    return key


def check_form(authorization: str, key: bytes) -> None:
    """AuthError unless this is the admin key, or looks like an API key, which may open the port or not."""
    scheme, _, given = authorization.partition(" ")
    text = given.strip()
    if scheme.lower() == "bearer" and (hmac.compare_digest(text.encode(), key) or id_of(text) is not None):
        return
    raise AuthError("the admin key is missing or wrong", todo="send it as Authorization: Bearer <key>")


def body_limit(path: str, max_body_bytes: int) -> int:
    """Maximum body length on the admin port; a prompt to explain may be as long as one to be served."""
    limits = {EXPLAIN_PATH: max_body_bytes, REPAIR_PATH: _REPAIR_BYTES, DESIRED_PATH: _DESIRED_BYTES}
    return limits.get(path, _MAX_BODY_BYTES)


class AdminLock:
    """Credentials of the admin port: the admin key of `up`, or an API key with the scope admin."""

    def __init__(self, key: bytes, gate: Authenticator) -> None:
        self._key, self._gate = key, gate

    def check(self, authorization: str) -> None:
        """Raises AuthError or PermissionDeniedError."""
        scheme, _, given = authorization.partition(" ")
        text = given.strip()
        is_right = hmac.compare_digest(text.encode(), self._key)
        if scheme.lower() == "bearer" and is_right:
            return
        if id_of(text) is None:
            raise AuthError("the admin key is missing or wrong", todo="send it as Authorization: Bearer <key>")
        self._gate.admit(authorization, Scope.ADMIN)


def create_admin_app(
    page: StatusPage,
    metrics: Metrics,
    lock: AdminLock,
    on_down: OnDown,
    audits: AuditHandlers,
    table: WorkerTable,
    routing: RoutingHandlers,
    keyring: Keyring,
    slo_handlers: SloHandlers,
    scaling: ScalingHandlers,
    live: LiveEvents,
    figures: TimeSeries,
    api: ApiRelay,
) -> Starlette:
    """The application behind the admin port. `on_down` stores the wish that the cluster ends."""
    routes = [
        *_state_routes(lock, page, on_down, table),
        *_audit_routes(lock, audits, page.config.settings.max_body_bytes),
        *_routing_routes(lock, routing, page.config.settings.max_body_bytes),
        *_tenant_routes(lock, keyring, slo_handlers),
        *_scaling_routes(lock, scaling),
        *_page_routes(lock, live, figures, api),
        Route("/metrics", _scraping(metrics), methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


def _state_routes(lock: AdminLock, page: StatusPage, on_down: OnDown, table: WorkerTable) -> list[Route]:
    traces = TraceHandlers(page.config.router_id, page.dispatcher, page.clock, time.time)

    async def trace(request: Request) -> Response:
        return _json(traces.find(request.path_params["request"]))

    async def down(request: Request) -> Response:
        await on_down()
        return _json({"is_stopping": True}, 202)

    return [
        Route("/admin/v1/status", _read_only(lock, page.status), methods=["GET"]),
        Route("/admin/v1/requests", _read_only(lock, page.requests), methods=["GET"]),
        Route(TRACE_PATH + "{request}", _keyed(lock, trace), methods=["GET"]),
        Route(TRACES_PATH, _read_only(lock, traces.latest), methods=["GET"]),
        Route("/admin/v1/down", _keyed(lock, down), methods=["POST"]),
        Route("/admin/v1/net", _read_only(lock, lambda: net(table)), methods=["GET"]),
    ]


def _audit_routes(lock: AdminLock, audits: AuditHandlers, max_body_bytes: int) -> list[Route]:
    async def repair(request: Request) -> Response:
        try:
            holds = orjson.loads(await _body_of(request, max_body_bytes))["holds"]
            wanted = [dict(hold) for hold in holds]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError('the body must be {"holds": [...]}', why=str(error)) from error
        return _json(await audits.repair(wanted))

    return [
        Route("/admin/v1/kv/audit", _read_only(lock, audits.look), methods=["GET"]),
        Route(REPAIR_PATH, _keyed(lock, repair), methods=["POST"]),
    ]


def _routing_routes(lock: AdminLock, routing: RoutingHandlers, max_body_bytes: int) -> list[Route]:
    async def json_of(request: Request) -> object:
        try:
            return orjson.loads(await _body_of(request, max_body_bytes))
        except ValueError as error:
            raise InvalidRequestError("the body is not valid JSON", why=str(error)) from error

    async def policy(request: Request) -> Response:
        return _json(routing.policy() if request.method == "GET" else routing.select(await json_of(request)))

    async def explain(request: Request) -> Response:
        return _json(await routing.explain(await json_of(request)))

    return [
        Route(POLICY_PATH, _keyed(lock, policy), methods=["GET", "POST"]),
        Route(EXPLAIN_PATH, _keyed(lock, explain), methods=["POST"]),
    ]


def _tenant_routes(lock: AdminLock, keyring: Keyring, slo_handlers: SloHandlers) -> list[Route]:
    async def create_key(request: Request) -> Response:
        return _json(await keyring.create(await read_json(request, _MAX_BODY_BYTES, NewKey)), 201)

    async def revoke_key(request: Request) -> Response:
        return _json(await keyring.revoke(request.path_params["key"]))

    async def slo(request: Request) -> Response:
        if request.method == "GET":
            return _json(slo_handlers.list())
        return _json(slo_handlers.set(await read_json(request, _MAX_BODY_BYTES, NewSlo)))

    return [
        Route("/admin/v1/keys", _read_only(lock, keyring.list), methods=["GET"]),
        Route("/admin/v1/keys", _keyed(lock, create_key), methods=["POST"]),
        Route("/admin/v1/keys/{key}", _keyed(lock, revoke_key), methods=["DELETE"]),
        Route(SLO_PATH, _keyed(lock, slo), methods=["GET", "POST"]),
    ]


def _scaling_routes(lock: AdminLock, scaling: ScalingHandlers) -> list[Route]:
    async def desired(request: Request) -> Response:
        if request.method == "GET":
            return _json(await scaling.desired())
        return _json(await scaling.write(await read_json(request, _DESIRED_BYTES, NewState)))

    async def propose(request: Request) -> Response:
        return _json(await scaling.propose(await read_json(request, _MAX_BODY_BYTES, NewWish)))

    async def events(request: Request) -> Response:
        count = request.query_params.get("count", str(_EVENTS))
        if not count.isdecimal() or len(count) > 9:
            raise InvalidRequestError(f"count is {count[:20]!r}", why="it must be a number", param="count")
        return _json(await scaling.happened(request.query_params.get("after", ""), int(count)))

    return [
        Route(DESIRED_PATH, _keyed(lock, desired), methods=["GET", "POST"]),
        Route(f"{DESIRED_PATH}/propose", _keyed(lock, propose), methods=["POST"]),
        Route("/admin/v1/plan", _read_only(lock, scaling.planned), methods=["GET"]),
        Route("/admin/v1/events", _keyed(lock, events), methods=["GET"]),
    ]


def live_events(page: StatusPage, table: WorkerTable, scaling: ScalingHandlers, figures: TimeSeries) -> LiveEvents:
    """The live sections of this router's page, besides its files."""
    traces = TraceHandlers(page.config.router_id, page.dispatcher, page.clock, time.time)

    sections: dict[str, Read] = {
        "status": lambda: trimmed(page.status()),
        "links": lambda: net(table),
        "desired": scaling.desired,
        "plan": scaling.planned,
        "events": lambda: scaling.happened("", _EVENTS),
        "requests": traces.latest,
        "figures": lambda: curves(figures.raw()),
    }
    return LiveEvents({name: _awaited(read) for name, read in sections.items()}, page.clock)


def _page_routes(lock: AdminLock, live: LiveEvents, figures: TimeSeries, api: ApiRelay) -> list[Route]:
    async def stream(request: Request) -> Response:
        return live.open()

    return [
        *site_routes(),
        Route(LIVE_PATH, _keyed(lock, stream), methods=["GET"]),
        Route(FIGURES_PATH, _read_only(lock, figures.raw), methods=["GET"]),
        Route(CHAT_PATH, _keyed(lock, api.chat), methods=["POST"]),
    ]


def _scraping(metrics: Metrics) -> Endpoint:
    async def scrape(request: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    return scrape


async def _body_of(request: Request, max_body_bytes: int) -> bytes:
    return await read_body(request, body_limit(request.scope["path"], max_body_bytes))


def _awaited(read: Read) -> Callable[[], Awaitable[object]]:
    """`read` as a coroutine function, whether it is one or not."""

    async def run() -> object:
        found = read()
        return await found if isawaitable(found) else found

    return run


def _read_only(lock: AdminLock, read: Read) -> Endpoint:
    """An endpoint that answers with the value of `read`."""

    async def show(request: Request) -> Response:
        return _json(await _awaited(read)())

    return _keyed(lock, show)


def _keyed(lock: AdminLock, endpoint: Endpoint) -> Endpoint:
    async def run(request: Request) -> Response:
        try:
            lock.check(request.headers.get("authorization", ""))
            return await endpoint(request)
        except TandemError as error:
            return error_response(error)
        except Exception as error:  # noqa: BLE001 - operators get an error object too
            _log.exception("admin request failed")
            return error_response(InternalError("the router failed", why=type(error).__name__, todo="report this"))

    return run


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = shortened(request.scope["path"])  # not of request.url, which a strange Host makes unreadable
    return error_response(InvalidRequestError(f"{request.method} {path} does not exist"), status)


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
