"""Headers of a request: read once, and looked up without looking through all of them each time."""

from __future__ import annotations

from starlette.requests import Request

_BY_NAME = "tandem.headers"
"""Under which name the scope holds them."""


def header(request: Request, name: str) -> str | None:
    """As `request.headers.get` of a `name` in lower case: of several of one name the first."""
    found = request.scope.get(_BY_NAME)
    if found is None:
        found = request.scope[_BY_NAME] = dict(reversed(request.scope["headers"]))
    value: bytes | None = found.get(name.encode())
    return None if value is None else value.decode("latin-1")
