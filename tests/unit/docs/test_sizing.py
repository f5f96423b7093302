"""docs/operate/sizing.md: its figures are those of the code and of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.controlplane.planner.hardware import HARDWARE, MODELS, rates
from tandem.core.config import RouterSection
from tests.unit.docs.operating import table

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "operate" / "sizing.md").read_text()


def test_what_workers_hold() -> None:
    rows = []
    for name, model in MODELS.items():
        held = 64 * 4096 * model.kv_token_bytes
        least = next(tp for tp in (1, 2, 4, 8) if rates(HARDWARE["h100"], model, tp))
        rows.append([
            f"`{name}`", f"{model.weight_bytes / 1e9:.0f} GB", f"{held / 2**30:.0f} GiB",
            f"{2**33 // model.kv_token_bytes:,}", str(least),
        ])  # fmt: skip
    assert table(TEXT, "Workers") == rows
    assert HARDWARE["h100"].memory_bytes == 80e9


def test_what_a_router_served() -> None:
    rows: list[dict[str, Any]] = json.loads((ROOT / "bench/results/router.json").read_text())["rows"]
    figures = {(row["case"], row["metric"]): row["value"] for row in rows}
    text = "128-token text, 32 tokens"
    most = figures[text, "streams a second, the most served"]
    assert f"one served at most {most:.0f} streams a second of 128-token prompts\nand 32-token answers" in TEXT
    assert f"{round(figures['128 token ids, 512 tokens', 'tokens a second, served'], -2):,.0f} tokens a second" in TEXT


def test_bounds_are_those_of_the_code() -> None:
    section = RouterSection()
    assert f"`index_memory_bytes` ({section.index_memory_bytes >> 20} MiB" in TEXT
    assert f"`slow_reader_backlog_bytes` ({section.slow_reader_backlog_bytes >> 20} MiB)" in TEXT
