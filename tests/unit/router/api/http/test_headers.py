"""Headers are looked up as Starlette's own object has them."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from tandem.router.api.http.headers import header

PAIRS = [(b"host", b"a"), (b"x-slo-class", b"first"), (b"x-slo-class", b"second"), (b"origin", b""), (b"who", b"\xe9")]


@pytest.mark.parametrize("name", ["host", "x-slo-class", "origin", "who", "absent"])
def test_one_is_found_as_among_all_of_them(name: str) -> None:
    request = Request({"type": "http", "headers": PAIRS})
    assert [header(request, name), header(request, name)] == [request.headers.get(name)] * 2
