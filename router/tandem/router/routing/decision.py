"""A routing decision as plain JSON values: for the admin port, and for clients that ask with X-Tandem-Route."""

from __future__ import annotations

from typing import Any

from tandem.router.routing.plan import Cost, Option, Plan

_DIGITS = 6


def decision(plan: Plan) -> dict[str, Any]:
    """A plan and what it was weighed against; seconds, tokens, and scores in the policy's unit."""
    return {
        "policy": plan.policy,
        "prefill": plan.prefill,
        "decode": plan.decode,
        "reason": plan.reason,
        "prefill_hit_tokens": plan.prefill_hit_tokens,
        "decode_hit_tokens": plan.decode_hit_tokens,
        "sources": [{"worker": source.worker, "tokens": source.tokens} for source in plan.sources],
        "options": [_option(option) for option in plan.options],
    }


def _option(option: Option) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prefill": option.prefill.worker if option.prefill is not None else None,
        "decode": option.decode.worker,
        "score": round(option.score, _DIGITS),
    }
    return body | {"cost": _cost(option.cost)} if option.cost is not None else body


def _cost(cost: Cost) -> dict[str, float]:
    parts = {
        "queue_s": cost.queue_s, "compute_s": cost.compute_s, "move_s": cost.move_s, "room_s": cost.room_s,
        "decode_s": cost.decode_s, "others_s": cost.others_s, "broken_s": cost.broken_s, "reuse_s": cost.reuse_s,
        "total_s": cost.total_s,
    }  # fmt: skip
    return {name: round(value, _DIGITS) for name, value in parts.items()}
