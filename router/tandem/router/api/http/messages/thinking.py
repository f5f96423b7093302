"""Thinking and effort of /v1/messages as the reasoning effort of a chat."""

from __future__ import annotations

from tandem.router.api.http.messages.schemas import CountTokensRequest
from tandem.router.output_formats.choice import ThoughtLimit

_BUDGETS = ((4096, "low"), (16_384, "medium"))
"""Tokens of thought below which an effort is enough."""


def effort_of(body: CountTokensRequest) -> str:
    """The `reasoning_effort` of a chat: "none" unless thinking is asked for. A budget is a level, too."""
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        return "none"
    if body.output_config is not None and body.output_config.effort is not None:
        return body.output_config.effort
    budget = thinking.budget_tokens
    return "high" if budget is None else next((level for most, level in _BUDGETS if budget < most), "high")


def limit_of(body: CountTokensRequest) -> ThoughtLimit | None:
    """The bound on thoughts; None = there is none."""
    budget = body.thinking.budget_tokens if body.thinking is not None and body.thinking.type == "enabled" else None
    return None if budget is None else ThoughtLimit(budget, "thinking.budget_tokens")


def shows_thoughts(body: CountTokensRequest) -> bool:
    """False if the thoughts themselves are to be left out of the answer."""
    return body.thinking is None or body.thinking.display != "omitted"
