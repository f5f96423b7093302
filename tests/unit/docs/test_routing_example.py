"""The worked example in docs/routing.md: its tables are the costs that the policy computes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tandem.core.config import Disaggregation
from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.lifecycle import RoleName
from tandem.core.prefill_queue import PrefillSpeed, QueuedWork, QueueRules
from tandem.router.routing.fetch_sources import with_sources
from tandem.router.routing.plan import Candidate, Job, Option, Plan
from tandem.router.routing.policies.cost import CostPolicy

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "routing.md").read_text()
EXAMPLE = PAGE.split("## A worked example")[1].split("\n## ")[0]
LAYERS, HEADS, WIDTH = 32, 8, 128
KV = KVProfile(
    fingerprint="example",
    identity=(),
    layout=KVLayout(
        groups=(
            KVGroupSpec(
                group=GroupId(0), layers=tuple(range(LAYERS)), planes=2, heads=HEADS, width=WIDTH, block_tokens=16,
                dtype="bfloat16",
            ),
        )
    ),
)  # fmt: skip
JOB = Job(prompt_tokens=3000, max_tokens=256)
SHORT, LONG = QueuedWork(due_s=0.5, tokens=1500), QueuedWork(due_s=20.0, tokens=8000)


def _worker(name: str, role: RoleName) -> Candidate:
    return Candidate(
        worker=WorkerId(name), incarnation=Incarnation(1), role=role, prefill_speed=PrefillSpeed(tokens_per_s=5000.0),
        rules=QueueRules(), free_blocks=10_000, total_blocks=10_000, profile=KV, link_speed=lambda to: 1e9,
    )  # fmt: skip


def _plan(*queue: QueuedWork) -> Plan:
    """With this queue at prefill-0."""
    busy = dataclasses.replace(
        _worker("prefill-0", RoleName.PREFILL), held_tokens=2000, reusable_tokens=2000, queue=queue,
        queued_tokens=sum(row.tokens for row in queue),
    )  # fmt: skip
    decode = dataclasses.replace(
        _worker("decode-0", RoleName.DECODE), in_flight=8, running=8, decode_step_s=0.02, decode_sequence_s=0.0005
    )
    candidates = (busy, _worker("prefill-1", RoleName.PREFILL), decode)
    return with_sources(CostPolicy(Disaggregation.AUTO).plan(JOB, candidates), JOB, candidates)


def _row(option: Option) -> list[str]:
    cost = option.cost
    assert cost is not None
    prefill = f"`{(option.prefill or option.decode).worker}`"
    parts = (cost.queue_s, cost.compute_s, cost.move_s, cost.room_s, cost.decode_s, cost.others_s, cost.total_s)
    return [prefill, f"`{option.decode.worker}`", *(f"{part:.3f}" for part in parts)]


def _tables() -> list[list[list[str]]]:
    """Cells of the tables in the example that list options, without marks of emphasis."""
    tables = re.findall(r"\| prefill \| decode \|.*\n\|---.*\n((?:\|.*\n)+)", EXAMPLE)
    return [
        [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in tables
    ]


def test_the_options_of_both_tables_are_those_of_the_policy() -> None:
    assert _tables() == [[_row(option) for option in _plan(*queue).options] for queue in ((SHORT, LONG), ())]


def test_the_choices_are_those_of_the_policy() -> None:
    queued, idle = _plan(SHORT, LONG), _plan()
    assert (queued.prefill, queued.decode, [one.worker for one in queued.sources]) == (
        "prefill-1", "decode-0", ["prefill-0"],
    )  # fmt: skip
    assert (idle.prefill, idle.decode, idle.sources) == ("prefill-0", "decode-0", ())


def test_nothing_in_the_example_is_promised_or_popular() -> None:
    costs = [option.cost for queue in ((SHORT, LONG), ()) for option in _plan(*queue).options]
    assert all(cost is not None and not cost.broken_s and not cost.reuse_s for cost in costs)


def test_bytes_of_a_token() -> None:
    [group] = KV.layout.groups
    assert group.block_bytes() / group.block_tokens == pytest.approx(131_072)
    assert "131,072 bytes" in EXAMPLE
