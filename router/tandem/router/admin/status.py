"""The router's view of the cluster, as plain JSON values for operators. Never prompts or tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.core.admin_schema import ReportedWorker, copied
from tandem.core.clock import Clock
from tandem.core.config import RouterConfig
from tandem.core.version import release
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.inflight_request import InFlightRequest
from tandem.router.dispatch.readiness import Readiness
from tandem.router.dispatch.retry_policy import Breakers, BreakerState
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.table import WorkerTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusPage:
    """Reads everything when asked; keeps nothing."""

    config: RouterConfig
    incarnation: int
    table: WorkerTable
    dispatcher: Dispatcher
    breakers: Breakers
    readiness: Readiness
    clock: Clock
    addresses: Callable[[], dict[str, Any]]
    policy: Callable[[], str]
    admission: Callable[[], dict[str, Any]]

    def status(self) -> dict[str, Any]:
        missing = self.readiness.missing()
        return {
            "cluster": self.config.cluster,
            "model": self.config.models[0].name,
            "served_names": list(self.config.models[0].served_names),
            "models": [{"model": model.name, "served_names": list(model.served_names)} for model in self.config.models],
            "version": release(),
            "disaggregation": self.config.settings.disaggregation.value,
            "policy": self.policy(),
            "is_ready": self.readiness.is_ready,
            "missing": missing,
            "registry_trouble": self.table.trouble,
            "router": {
                "id": self.config.router_id,
                "incarnation": str(self.incarnation),
                "in_flight": len(self.dispatcher.flights),
                **self.addresses(),
            },
            "admission": self.admission(),
            "workers": [self._worker(link) for link in sorted(self.table.links, key=lambda link: link.worker)],
            "pairs": [
                {"prefill": prefill, "decode": decode, "form": how}
                for prefill, decode, how in sorted(self.table.paired())
            ],
            "refused_pairs": [
                {"prefill": prefill, "decode": decode, "why": why}
                for prefill, decode, why in sorted(self.table.refused_pairs())
            ],
        }

    def requests(self) -> dict[str, Any]:
        now_s = self.clock.now_s()
        flights = sorted(self.dispatcher.flights, key=lambda flight: flight.started_s)
        return {"requests": [_request(flight, now_s) for flight in flights]}

    def _worker(self, link: WorkerLink) -> dict[str, Any]:
        breaker = self.breakers.state((link.worker, link.where.incarnation))
        return {**_worker(link), "breaker": breaker.name.lower()}


def absent_state(*, is_registered: bool) -> str:
    """State of a worker that is not connected: nothing that it reported is true any more."""
    return "unreachable" if is_registered else "gone"


def _worker(link: WorkerLink) -> dict[str, Any]:
    facts, load = link.facts, link.load
    body: dict[str, Any] = {
        "worker": link.worker,
        "address": link.where.address,
        # 63-bit numbers do not survive every JSON reader.
        "incarnation": str(link.where.incarnation),
        "is_connected": link.is_up,
        "is_registered": link.is_registered,
        "state": link.state.value if link.is_up else absent_state(is_registered=link.is_registered),
        "trouble": link.trouble,
        "router_in_flight": len(link.requests),
        "version": link.version,
        "clock_skew_s": round(link.clock_skew_s, 3) if link.clock_skew_s is not None else None,
    }
    if facts is None:
        return body
    return body | copied(
        ReportedWorker,
        facts,
        load,
        facts.profile,
        protocol=".".join(map(str, facts.profile.protocol)),
        wire_codec=", ".join(facts.profile.offers),
        wire_codec_below_bytes_per_s=facts.profile.offers_below_bytes_per_s,
        prefill_tokens_per_s=load.prefill_speed.tokens_per_s,
        blocks=[asdict(blocks) for blocks in load.blocks],
    )


def _request(flight: InFlightRequest, now_s: float) -> dict[str, Any]:
    return {
        "request": flight.id,
        "attempt": flight.attempt,
        "last_failure": flight.history.error.message if flight.history.error is not None else "",
        "phase": flight.phase.value,
        "age_s": round(now_s - flight.started_s, 3),
        "prefill": flight.plan.prefill,
        "decode": flight.plan.decode,
        "reason": flight.plan.reason,
        "predicted_prefill_hit_tokens": flight.plan.prefill_hit_tokens,
        "predicted_decode_hit_tokens": flight.plan.decode_hit_tokens,
        "sources": [{"worker": source.worker, "tokens": source.tokens} for source in flight.plan.sources],
        "cached_tokens": flight.cached_tokens,
        "prompt_tokens": len(flight.work.prompt),
        "output_tokens": flight.output_tokens,
        "waits_for": sorted(flight.legs),
    }


def net(table: WorkerTable) -> dict[str, Any]:
    """`measured`: every measurement or failure between two hosts, `is_used` if some link goes that way; `links`: those
    in use; `workers`: the host of each."""
    links = [
        {"worker": link.worker, **asdict(used)}
        for link in sorted(table.links, key=lambda link: link.worker)
        for used in link.used_links
    ]
    used_routes = {(used["from_host"], used["to_host"], used["transport"]) for used in links}
    rows = sorted(table.speeds.rows, key=lambda row: (row.route, row.failure, row.peer))
    measured = [{**asdict(row), "is_used": row.route in used_routes and not row.failure} for row in rows]
    workers = [
        {"worker": link.worker, "role": link.facts.role.value, "host": link.facts.host}
        for link in sorted(table.links, key=lambda link: link.worker)
        if link.facts is not None
    ]
    return {"workers": workers, "measured": measured, "links": links}


def workers_of(pages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The workers of several processes' statuses, by name.

    A worker's own reports are taken from a process that is connected to it. Requests that processes have there are
    added; of per-process findings, connection and breaker, those of the process that is worst off are taken.
    """
    by_worker: dict[str, list[Mapping[str, Any]]] = {}
    for page in pages:
        for row in page["workers"]:
            by_worker.setdefault(row["worker"], []).append(row)
    return [_together(rows) for _, rows in sorted(by_worker.items())]


def _together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    heard = max(rows, key=lambda row: (row["is_connected"], "role" in row))
    worst = min(rows, key=lambda row: (row["is_connected"], row["state"] == "ready", not row["trouble"]))
    is_registered = any(row["is_registered"] for row in rows)
    return {
        **heard,
        "is_connected": worst["is_connected"],
        "is_registered": is_registered,
        "state": worst["state"] if worst["is_connected"] else absent_state(is_registered=is_registered),
        "trouble": next((row["trouble"] for row in (worst, *rows) if row["trouble"]), ""),
        "router_in_flight": sum(row["router_in_flight"] for row in rows),
        "breaker": max((row["breaker"] for row in rows), key=lambda name: BreakerState[name.upper()]),
    }
