"""`clusterctl status` beside the desired state: how many workers are wanted, also of roles without a worker."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from tandem.clusterctl.inspect import status_view
from tandem.clusterctl.inspect.health import pool_of
from tandem.clusterctl.inspect.status import with_wanted

WORKER = {"is_connected": True, "is_registered": True, "model": "m", "role": "decode"}


def desired(**counts: int) -> dict[str, Any]:
    return {"pools": [{"model": "m", "role": role, "count": count} for role, count in counts.items()]}


def shown(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    Console(width=120, file=text).print(status_view.pools({"pools": rows}))
    return text.getvalue()


def test_wanted_stands_beside_what_is_there() -> None:
    rows = with_wanted([pool_of("m", "decode", [WORKER])], desired(prefill=1, decode=2, mixed=0))
    assert [(row["role"], row["wanted"], row["workers"], row["ready"]) for row in rows] == [
        ("decode", 2, 1, 1), ("prefill", 1, 0, 0),
    ]  # fmt: skip
    assert "WANTED" in shown(rows)
    assert "1/1" in shown(rows)


def test_what_is_there_and_not_wanted_is_0_and_nobody_who_says_what_is_wanted_is_nothing() -> None:
    pools = [pool_of("m", "decode", [WORKER])]
    assert [row["wanted"] for row in with_wanted(pools, desired(prefill=1, decode=0))] == [0, 1]
    assert with_wanted(pools, {}) == pools
    assert "WANTED" not in shown(with_wanted(pools, {}))
