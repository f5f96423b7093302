"""`clusterctl route` for people: a decision with costs, one with bare scores, and what is no prompt."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandem.clusterctl.gateway import route, route_view
from tandem.clusterctl.schemas.gateway import RoutingCost
from tandem.core.errors import ConfigError
from tandem.core.ids import WorkerId
from tandem.router.routing.decision import decision
from tandem.router.routing.plan import Cost, Option, Plan
from tests.unit.router.candidates import d

COST = {"queue_s": 0.5, "compute_s": 0.25, "move_s": 0.005, "room_s": 0.0, "decode_s": 0.001, "others_s": 0.0,
        "broken_s": 0.0, "reuse_s": 0.0, "total_s": 0.756}  # fmt: skip
WORKER: dict[str, Any] = {
    "worker": "p0", "role": "prefill", "queued_tokens": 700, "queued_requests": 2, "in_flight": 2, "decoding": 0,
    "held_tokens": 32, "reusable_tokens": 32, "free_blocks": 90, "total_blocks": 100,
    "prefill_tokens_per_s": 1234.5, "decode_step_s": 0.0, "decode_sequence_s": 0.0,
}  # fmt: skip
FOUND: dict[str, Any] = {
    "prompt_tokens": 100, "max_tokens": 16, "policy": "cost", "prefill": "p0", "decode": "d0", "reason": "least",
    "prefill_hit_tokens": 32, "decode_hit_tokens": 0, "sources": [{"worker": "d1", "tokens": 64}],
    "options": [{"prefill": "p0", "decode": "d0", "score": 0.756, "cost": COST},
                {"prefill": None, "decode": "m0", "score": 0.9, "cost": COST | {"total_s": 0.9}}],
    "workers": [WORKER],
}  # fmt: skip


def shown(found: dict[str, Any]) -> list[str]:
    text = io.StringIO()
    route_view.show(found, Console(file=text, width=200))
    return [" ".join(line.split()) for line in text.getvalue().splitlines()]


def test_a_decision_with_costs() -> None:
    lines = shown(FOUND)
    assert "chosen p0 → d0: least" in lines
    assert "fetched 64 tokens from d1" in lines
    assert "PREFILL DECODE QUEUE COMPUTE MOVE ROOM DECODE OTHERS BROKEN REUSE TOTAL, ms" in lines
    assert "p0 d0 500.0 250.0 5.0 0.0 1.0 0.0 0.0 0.0 756.0" in lines
    assert "– m0 500.0 250.0 5.0 0.0 1.0 0.0 0.0 0.0 900.0" in lines
    assert "p0 prefill 700 2 0 32 90 1234 –" in lines


def test_every_part_of_a_cost_that_routers_tell_is_documented_and_shown() -> None:
    option = Option(decode=d(), prefill=None, reason="", score=0.0, cost=Cost())
    plan = Plan(decode=WorkerId("d0"), prefill=None, reason="", options=(option,))
    told = decision(plan)["options"][0]["cost"]
    assert set(told) == set(RoutingCost.__annotations__) == {*route_view._PARTS, "total_s"}


def test_a_decision_with_bare_scores() -> None:
    options = [{"prefill": None, "decode": "m0", "score": -4.5}]
    lines = shown(FOUND | {"options": options, "prefill": None, "decode": "m0", "sources": [], "policy": "llm_d"})
    assert "chosen m0: least" in lines
    assert "PREFILL DECODE SCORE" in lines
    assert "– m0 -4.5" in lines


def test_one_prompt_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt"
    file.write_text("from a file")
    assert route._prompt("a text", "", None) == "a text"
    assert route._prompt("", "17, 4,256", None) == [17, 4, 256]
    assert route._prompt("", "", file) == "from a file"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert route._prompt("-", "", None) == "from a pipe"
    for wrong in (("", "", None), ("a", "1", None), ("a", "", file)):
        with pytest.raises(ConfigError, match="give one prompt"):
            route._prompt(*wrong)
    with pytest.raises(ConfigError, match="--tokens is 'one,two'"):
        route._prompt("", "one,two", None)
    with pytest.raises(ConfigError, match="cannot read the prompt"):
        route._prompt("", "", tmp_path / "none")
    file.write_bytes(b"\xff")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    for odd in (("", "", file), ("-", "", None)):
        with pytest.raises(ConfigError, match="cannot read the prompt: it is no UTF-8 text"):
            route._prompt(*odd)
