"""Status of admission, as plain JSON values for operators; and that of several routers as one. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.router.admission.admission_controller import AdmissionController

MAX_TENANTS = 32
"""So many are listed, those with the longest wait first."""
_DIGITS = 3


def view(admission: AdmissionController, refused: Mapping[str, int], now_s: float) -> dict[str, Any]:
    """Waiting requests by model, tenant and SLO class ("" = none), and the number `refused` by reason.

    `predicted_wait_s` of a tenant is for one more request behind all of its own; that of a model for a tenant that has
    none there. None = how fast the queue is worked off is not known.
    """
    return {
        "waiting": admission.waiting,
        "refused": dict(sorted(refused.items())),
        "models": [_lane(admission, model, now_s) for model in sorted(admission.lanes)],
    }


def _lane(admission: AdmissionController, model: str, now_s: float) -> dict[str, Any]:
    queue, rate = admission.lanes[model]
    rows = list(queue)
    tenants = Counter(row.tenant for row in rows)
    first_s: dict[str, float] = {}
    for row in rows:
        first_s[row.tenant] = min(row.arrived_s, first_s.get(row.tenant, math.inf))
    longest = sorted(first_s, key=lambda tenant: (first_s[tenant], tenant))[:MAX_TENANTS]

    def wait_s(tenant: str) -> float | None:
        cost = queue.cost_before(tenant, math.inf) if rows else 0
        return 0.0 if not cost else round(cost / rate.per_s, _DIGITS) if rate.per_s else None

    listed = [
        {
            "tenant": tenant,
            "waiting": tenants[tenant],
            "longest_s": round(now_s - first_s[tenant], _DIGITS),
            "predicted_wait_s": wait_s(tenant),
        }
        for tenant in longest
    ]
    return {
        "model": model,
        "waiting": len(rows),
        "waiting_tokens": sum(row.cost for row in rows),
        "tokens_per_s": round(rate.per_s, _DIGITS) if rate.per_s else None,
        "predicted_wait_s": wait_s(""),
        "classes": dict(sorted(Counter(row.terms.slo for row in rows).items())),
        "tenants": listed,
    }


def added_up(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several routers' as one: counts and rates are added; for waiting the longest time counts."""
    refused: Counter[str] = Counter()
    lanes: dict[str, list[Mapping[str, Any]]] = {}
    for one in views:
        refused.update(one["refused"])
        for lane in one["models"]:
            lanes.setdefault(lane["model"], []).append(lane)
    return {
        "waiting": sum(one["waiting"] for one in views),
        "refused": dict(sorted(refused.items())),
        "models": [_added_lane(model, lanes[model]) for model in sorted(lanes)],
    }


def _added_lane(model: str, lanes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    classes: Counter[str] = Counter()
    tenants: dict[str, list[Mapping[str, Any]]] = {}
    for lane in lanes:
        classes.update(lane["classes"])
        for row in lane["tenants"]:
            tenants.setdefault(row["tenant"], []).append(row)
    rates = [lane["tokens_per_s"] for lane in lanes if lane["tokens_per_s"] is not None]
    return {
        "model": model,
        "waiting": sum(lane["waiting"] for lane in lanes),
        "waiting_tokens": sum(lane["waiting_tokens"] for lane in lanes),
        "tokens_per_s": round(sum(rates), _DIGITS) if rates else None,
        "predicted_wait_s": _most(lanes, "predicted_wait_s"),
        "classes": dict(sorted(classes.items())),
        "tenants": _longest(
            [
                {
                    "tenant": tenant,
                    "waiting": sum(row["waiting"] for row in rows),
                    "longest_s": _most(rows, "longest_s"),
                    "predicted_wait_s": _most(rows, "predicted_wait_s"),
                }
                for tenant, rows in tenants.items()
            ]
        ),
    }


def _longest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (-row["longest_s"], row["tenant"]))[:MAX_TENANTS]


def _most(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max((row[name] for row in rows if row[name] is not None), default=None)
