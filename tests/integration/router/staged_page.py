"""The page's real files and stream before a made-up cluster, with something added to its every word."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem.core.clock import MonotonicClock
from tandem.router.admin.app import DESIRED_PATH, LIVE_PATH, TRACE_PATH
from tandem.router.admin.page.chat import CHAT_PATH
from tandem.router.admin.page.live_events import LiveEvents
from tandem.router.admin.page.static_files import site_routes
from tandem.router.api.servers import HttpServer, bind, port_of

STATES = ("ready", "draining", "flipping", "unreachable", "gone")
SPANS = (("wait", 0.0, 0.1), ("queue", 0.1, 0.3), ("prefill", 0.3, 0.9), ("transfer", 0.9, 1.0), ("decode", 1.0, 2.5))


def sections(added: str) -> dict[str, Any]:
    """Return the stream's sections for five workers of a role, each in another state; `added` ends every text that
    could come from outside."""
    workers = [_worker(f"{role}-{n}{added}", role, state, added) for role in ("prefill", "decode")
               for n, state in enumerate(STATES)]  # fmt: skip
    p, d = workers[0]["worker"], workers[len(STATES)]["worker"]
    link = {"worker": p, "peer": d, "rank": 0, "transport": f"shm{added}", "bytes_per_s": 3.2e9, "latency_s": 2e-5,
            "achieved_bytes_per_s": 2.1e9}  # fmt: skip
    forecast = {"split": f"5P:5D{added}", "attained": 0.97, "goodput_per_s": 12.5, "ttft_p90_s": 0.4,
                "itl_p90_s": 0.02, "prefill_busy": 0.7}  # fmt: skip
    plan = {"split": f"5P:5D{added}", "wanted": f"4P:6D{added}", "reason": f"decode is short{added}", "now": forecast,
            "unsettled": f"a worker flips{added}", "then": forecast, "is_advice": True,
            "last_action": {"at_s": 1e9, "what": f"flipped one{added}"}}  # fmt: skip
    event = {"place": f"1{added}", "time_s": 1e9, "kind": f"worker_lost{added}", "subject": p, "reason": f"x{added}"}
    return {
        "status": {
            "cluster": f"cluster{added}", "served_names": [f"model{added}"], "is_ready": True, "missing": [],
            "models": [{"model": f"model{added}", "served_names": [f"model{added}"]}], "workers": workers,
            "registry_trouble": f"trouble{added}", "router": {"in_flight": 3}, "admission": {"waiting": 2},
        },
        "links": {"links": [link]},
        "desired": {"desired": {"pools": _pools(added), "members": [
            {"worker_id": row["worker"], "role": row["role"], "is_cordoned": False} for row in workers
        ]}},
        "plan": {"mode": f"advise{added}", "plan": plan},
        "events": {"events": [event]},
        "requests": {"requests": [trace(f"chatcmpl-{number}{added}", p, d, added) for number in range(3)]},
        "figures": {"slots": [_slot(number) for number in range(60)], "totals": {"prompt_tokens": 100_000}},
        f"strange{added}": {"error": f"a section failed{added}"},
    }  # fmt: skip


def trace(request: str, prefill: str, decode: str, added: str) -> dict[str, Any]:
    """A request that moved once and failed."""
    workers = {"wait": "", "queue": prefill, "prefill": prefill, "transfer": f"{prefill} → {decode}", "decode": decode}
    return {
        "request": request, "outcome": "failed", "is_over": True, "error": f"lost{added}", "duration_s": 2.5,
        "prompt_tokens": 900, "cached_tokens": 100, "output_tokens": 60, "attempts": 2, "handoff": {"overhead_s": 0.1},
        "spans": [{"span": span, "worker": workers[span], "attempt": 1, "start_s": start_s, "end_s": end_s}
                  for span, start_s, end_s in SPANS],
    }  # fmt: skip


@contextlib.contextmanager
def staged(said: Mapping[str, Any], added: str) -> Iterator[str]:
    """The address of an admin port that takes any key, with `said` in its sections."""
    desk = LiveEvents({name: _saying(value) for name, value in said.items()}, MonotonicClock())

    async def stream(request: Request) -> Response:
        return desk.open()

    async def found(request: Request) -> Response:
        return JSONResponse(trace("chatcmpl-1", f"p{added}", f"d{added}", added))

    async def propose(request: Request) -> Response:
        after = {"version": 2, "pools": _pools(added)}
        changes = [{"worker_id": f"w{added}", "deed": f"flip{added}", "detail": f"so{added}"}]
        return JSONResponse({"is_changed": True, "before": after, "after": after, "changes": changes})

    routes = [
        *site_routes(),
        Route(LIVE_PATH, stream),
        Route(CHAT_PATH, _chatting(added), methods=["POST"]),
        Route(TRACE_PATH + "{request}", found),
        Route(f"{DESIRED_PATH}/propose", propose, methods=["POST"]),
    ]
    listener = bind("127.0.0.1", 0)
    server, loop = HttpServer(Starlette(routes=routes), listener), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.run(),), name="staged page")
    thread.start()
    try:
        yield f"http://127.0.0.1:{port_of(listener)}"
    finally:
        loop.call_soon_threadsafe(desk.end)
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
        loop.close()


def _worker(name: str, role: str, state: str, added: str) -> dict[str, Any]:
    row = {"worker": name, "role": role, "state": state, "trouble": "" if state == "ready" else f"it is {state}{added}"}
    if state == "gone":  # nothing else is known of it
        return row
    blocks = {"request": 30, "reserved": 5, "pushing": 3, "cached": 40, "free": 22, "total": 100}
    return {
        **row, "model": f"model{added}", "in_flight": 2, "queued_requests": 1, "running_requests": 2,
        "queued_tokens": 5000, "prefill_tokens_per_s": 8000.0, "decode_step_s": 0.015, "blocks": [blocks],
        "counters": {"step_seconds": 1.0},
    }  # fmt: skip


def _pools(added: str) -> list[dict[str, Any]]:
    return [{"role": role, "model": f"model{added}", "count": 5} for role in ("prefill", "decode")]


def _slot(number: int) -> dict[str, Any]:
    wave = 1 + 0.3 * (number % 7) / 7
    return {
        "at_s": 1e9 + 5 * number, "ttft_p50_s": 0.2 * wave, "ttft_p99_s": 0.9 * wave, "itl_p50_s": 0.015 * wave,
        "itl_p99_s": 0.03, "goodput_per_s": 5 * wave, "kept": 0.98, "answers_per_s": 5.1, "failed": 0,
        "output_tokens_per_s": 900 * wave, "prompt_tokens_per_s": 4000 * wave,
    }  # fmt: skip


def _saying(value: Any) -> Callable[[], Awaitable[Any]]:
    async def read() -> Any:
        return value

    return read


def _chatting(added: str) -> Callable[[Request], Awaitable[Response]]:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in ("I say ", added, "."):
            body = {"id": "chatcmpl-1", "choices": [{"delta": {"content": piece}}]}
            yield b"data: %s\n\n" % orjson.dumps(body)
        yield b"data: [DONE]\n\n"

    async def chat(request: Request) -> Response:
        return StreamingResponse(chunks(), media_type="text/event-stream")

    return chat
