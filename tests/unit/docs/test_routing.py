"""docs/routing.md against the code: the figures that it names."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.core.config import WorkerSection
from tandem.core.prefill_queue import ASSUMED_TOKENS_PER_S, MAX_ROWS
from tandem.engine.step_budget import TELLING_TOKENS
from tandem.router.routing.affinity import AFFINITY_REQUESTS, AFFINITY_TOKENS
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
)
from tandem.router.routing.inflight_load import STALE_S
from tandem.router.routing.plan import MAX_OPTIONS
from tandem.router.routing.policies import llm_d, sglang
from tandem.router.routing.policies.cost import ALIKE_S, TOP
from tandem.router.routing.prefix_popularity import LASTING_S
from tandem.router.routing.slo_penalty import UNSURE

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
