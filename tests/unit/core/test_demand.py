"""Routers' reports to the planner: a report survives the round trip, and nothing else passes for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import SloSection
from tandem.core.demand import MAX_ASKED, MAX_BYTES, Demand, DemandSample, WorkerSeen
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.prefill_queue import PrefillSpeed

COUNTS = st.integers(0, 1 << 40)
SECONDS = st.floats(0, 1e9).map(lambda value: round(value, 3))
NAMES = st.text(max_size=30)
ASKED = st.builds(
    DemandSample, age_s=SECONDS, prompt_tokens=COUNTS, output_tokens=COUNTS, cached_tokens=COUNTS, choices=COUNTS,
    has_ended=st.booleans(), slo=NAMES,
)  # fmt: skip
WORKERS = st.builds(
    WorkerSeen, worker=NAMES.map(WorkerId), role=st.sampled_from(RoleName), takes_work=st.booleans(),
    prefill_speed=st.builds(PrefillSpeed, tokens_per_s=SECONDS, context_s=SECONDS), decoding_sequences=COUNTS,
    decode_step_s=SECONDS, decode_sequence_s=SECONDS, in_flight=COUNTS, unique_prefix_bytes=COUNTS, kv_tokens=COUNTS,
    kv_token_bytes=COUNTS,
)  # fmt: skip
DEMANDS = st.builds(
    Demand,
    asked=st.lists(ASKED, max_size=5).map(lambda rows: tuple(sorted(rows, key=lambda one: one.age_s))),
    workers=st.lists(WORKERS, max_size=5).map(tuple),
    promises=st.dictionaries(NAMES, st.builds(SloSection, ttft_s=SECONDS, itl_s=SECONDS), max_size=3),
    link_bytes_per_s=SECONDS,
)
ONE = Demand(
    asked=(DemandSample(age_s=1.0, prompt_tokens=10),),
    workers=(WorkerSeen(worker=WorkerId("decode-0"), role=RoleName.DECODE),),
    promises={"chat": SloSection(ttft_s=1.0)},
)


@given(DEMANDS)
def test_it_comes_back_as_it_was(demand: Demand) -> None:
    assert Demand.from_json(demand.to_json()) == demand


def test_only_the_latest_requests_are_told() -> None:
    rows = tuple(DemandSample(age_s=float(age), prompt_tokens=1) for age in reversed(range(2 * MAX_ASKED)))
    found = Demand.from_json(Demand(asked=rows).to_json())
    assert [one.age_s for one in found.asked] == [float(age) for age in range(MAX_ASKED)]


@pytest.mark.parametrize(
    ("place", "row", "value"),
    [
        ("asked", 0, -1.0),
        ("asked", 0, float("nan")),
        ("asked", 0, float("inf")),
        ("asked", 0, True),
        ("asked", 1, 1.5),
        ("asked", 2, True),
        ("asked", 3, -1),
        ("asked", 4, 1 << 70),
        ("asked", 5, 1),
        ("asked", 6, "x" * 200),
        ("workers", 0, 7),
        ("workers", 1, "moon"),
        ("workers", 2, "yes"),
        ("workers", 3, "fast"),
        ("workers", 10, None),
        ("workers", 11, 2.5),
    ],
)
def test_a_wrong_type_or_size_is_refused(place: str, row: int, value: object) -> None:
    body: dict[str, Any] = json.loads(ONE.to_json())
    body[place][0][row] = value
    with pytest.raises(ValueError, match=r"."):
        Demand.from_json(json.dumps(body))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "7", "{}", "null", '{"asked": 3, "workers": [], "promises": {}}',
        '{"asked": [], "workers": [], "promises": {}, "link_bytes_per_s": -1}',
        '{"asked": [], "workers": [], "promises": {}, "link_bytes_per_s": "fast"}',
        '{"asked": [[]], "workers": [], "promises": {}}', '{"asked": [], "workers": [], "promises": []}',
        '{"asked": [], "workers": [], "promises": {"chat": [1]}}', " " * (MAX_BYTES + 1),
        json.dumps({"asked": [[1, 1, 1, 1, 1, True, ""]] * (MAX_ASKED + 1), "workers": [], "promises": {}}),
    ],
)  # fmt: skip
def test_what_is_no_such_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Demand.from_json(text)
