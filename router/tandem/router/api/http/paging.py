"""Lists page by page, as OpenAI's clients walk them: `limit`, `after`, `order` in, `has_more` and two ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tandem.core.errors import InvalidRequestError
from tandem.router.error_quoting import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The part of a list that a client asks for; `after` is the id of the last item that it has seen."""

    limit: int
    after: str | None
    is_ascending: bool

    def listed(self, shown: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
        """The list object."""
        return {
            "object": "list",
            "data": list(shown),
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": has_more,
        }


def page_of(request: Request, *, largest: int, default: int) -> Page:
    """The page that the query names, newest first unless it asks otherwise; InvalidRequestError names what is wrong."""
    query = request.query_params
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= largest:
        raise InvalidRequestError(f"limit is {quoted(text)}", why=f"it must be 1 to {largest}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is {quoted(order)}", why="it must be asc or desc", param="order")
    return Page(limit=limit, after=query.get("after"), is_ascending=order == "asc")
