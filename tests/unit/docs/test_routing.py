"""Test docs/routing.md: its figures and its worked example."""

import dataclasses
import re
from pathlib import Path

import pytest

from tandem.core.config import Disaggregation, WorkerSection
from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.prefill_queue import ASSUMED_TOKENS_PER_S, MAX_ROWS, PrefillSpeed, QueuedWork, QueueRules
from tandem.core.state_enums import RoleName
from tandem.engine.step_budget import TELLING_TOKENS
from tandem.router.routing.cost_model import (
    ANSWER_TOKENS,
    ASSUMED_BYTES_PER_S,
    ASSUMED_SEQUENCES,
    ASSUMED_STEP_S,
    CHUNK_TOKENS,
    FETCH_SETUP_S,
    HANDOFF_S,
    LEAST_COMPUTING,
    MAX_SOURCES,
    MET,
    MOST_COMPUTING,
    UNSURE,
    with_sources,
)
from tandem.router.routing.observed_traffic import LASTING_S, STALE_S
from tandem.router.routing.plan import AFFINITY_REQUESTS, AFFINITY_TOKENS, MAX_OPTIONS, Candidate, Job, Plan
from tandem.router.routing.policies import llm_d, sglang
from tandem.router.routing.policies.cost import ALIKE_S, TOP, CostPolicy

DOCS = Path(__file__).resolve().parents[3] / "docs"
WORDS = {"three": 3, "four": 4, "eight": 8, "half": 0.5}


def figures(pattern: str, page: str = "routing.md") -> list[float]:
    """Return the groups of `pattern` as numbers; it is on the page once."""
    (found,) = re.findall(pattern, " ".join((DOCS / page).read_text().split()))
    return [WORDS.get(one) or float(one.replace(",", "")) for one in ([found] if isinstance(found, str) else found)]


def test_the_parts_of_the_cost() -> None:
    assert figures(r"`(\S+) ms \+ max\(ahead") == [HANDOFF_S * 1000]
    assert figures(r"that of the last (\S+) tokens; `crossing`") == [CHUNK_TOKENS]
    assert figures(r"wire × min\(1, (\S+) ÷ m\)") == [CHUNK_TOKENS]
    assert figures(r"recent mean \((\S+) tokens before any answer has ended\)") == [ANSWER_TOKENS]
    shares = r"compute prompts for (\w+) of its time at least, and no worker for more than (\S+) %"
    assert figures(shares) == [LEAST_COMPUTING, MOST_COMPUTING * 100]
    assert figures(r"differ by less than (\S+) ms take turns") == [ALIKE_S * 1000]
    assert figures(r"All workers within (\S+) ms of the cheapest") == [ALIKE_S * 1000]


def test_the_risk_of_missing_an_slo() -> None:
    assert figures(r"`\(r − (\S+)\) ÷ (\S+)`, between 0 and 1") == [1 - UNSURE, 2 * UNSURE]
    assert figures(r"taken to be (\S+) times as long as the mean") == [MET]


def test_prefixes_that_are_shared() -> None:
    assert figures(r"a count that fades over (\S+) s") == [LASTING_S]
    assert figures(r"by (\S+) queued tokens and (\S+) requests in flight") == [AFFINITY_TOKENS, AFFINITY_REQUESTS]
    assert figures(r"− \((\S+) ms \+ g × KV bytes of a token") == [FETCH_SETUP_S * 1000]
    assert figures(r"names up to (\w+) of them") == [MAX_SOURCES]


def test_what_is_taken_for_what_nobody_measured() -> None:
    assert figures(r"computed fewer than (\S+) prompt tokens") == [TELLING_TOKENS]
    assert figures(r"or for (\S+) tokens/s") == [ASSUMED_TOKENS_PER_S]
    assert figures(r"a link for (\S+) MB/s") == [ASSUMED_BYTES_PER_S / 1e6]
    assert figures(r"a decode step for (\S+) ms, of which one sequence is a (\S+)th") == [
        ASSUMED_STEP_S * 1000,
        ASSUMED_SEQUENCES,
    ]
    fetching = r"`(\S+) ms \+ bytes / measured link speed` .* 100 MB/s, 5,000 tokens/s\), (\w+) at most"
    assert figures(fetching, "transfer/fetch.md") == [FETCH_SETUP_S * 1000, MAX_SOURCES]


def test_how_many_are_weighed_and_told() -> None:
    assert figures(r"the (\w+) cheapest of each side and the (\w+) decode workers") == [TOP, TOP]
    assert figures(r"weighed \(at most (\w+)\)") == [MAX_OPTIONS]
    assert figures(r"put together beyond (\S+) rows") == [MAX_ROWS]
    assert figures(r"last report is older than (\S+) s") == [STALE_S]


def test_nobody_starves() -> None:
    section = WorkerSection()
    assert figures(r"`queue_max_overtake_s` \((\S+) s\)") == [section.queue_max_overtake_s]
    assert figures(r"`queue_stretch` \((\S+)\) times") == [section.queue_stretch]


def test_the_published_formulas() -> None:
    weights = [llm_d.QUEUE_WEIGHT, llm_d.KV_WEIGHT, llm_d.PREFIX_WEIGHT]
    assert figures(r"(\d) × queue \+ (\d) × free blocks \+ (\d) × prefix") == weights
    assert figures(r"above (\S+) of the prompt, unless loads differ by more than (\S+) and a half") == [
        sglang.MATCH,
        sglang.ABSOLUTE,
    ]
    assert sglang.RELATIVE == 1.5


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


def _row(option: Plan) -> list[str]:
    cost = option.cost
    assert cost is not None
    prefill = f"`{option.prefill or option.decode}`"
    parts = (cost.queue_s, cost.compute_s, cost.move_s, cost.room_s, cost.decode_s, cost.others_s, cost.total_s)
    return [prefill, f"`{option.decode}`", *(f"{part:.3f}" for part in parts)]


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
