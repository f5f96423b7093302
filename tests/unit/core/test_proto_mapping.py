"""Test round trips of records: protobuf messages, events and reports to the planner."""

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import SloSection
from tandem.core.demand import MAX_ASKED, MAX_BYTES, Demand, DemandSample, WorkerSeen
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.ids import WorkerId
from tandem.core.prefill_queue import PrefillSpeed
from tandem.core.proto_mapping import from_proto, to_proto
from tandem.core.state_enums import RoleName
from tandem.rpc.v1 import worker_pb2 as w


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    layers: tuple[int, ...]
    heads: int
    window: int | None
    elsewhere: str = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    fingerprint: str
    revision: Colour
    codecs: tuple[str, ...]
    identity: dict[str, str]
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    worker: str
    profile: Profile


GROUP = Group(layers=(0, 2), heads=4, window=None)
PROFILE = Profile(
    fingerprint="f",
    revision=Colour.RED,
    codecs=("int8",),
    identity={"a": "b"},
    groups=(GROUP, replace(GROUP, window=0)),
)


def test_records_survive_a_message_with_records_inside() -> None:
    hello = Hello(worker="w0", profile=PROFILE)
    message = to_proto(w.WorkerInfo, hello)
    assert [group.HasField("window") for group in message.profile.groups] == [False, True]
    assert from_proto(Hello, w.WorkerInfo.FromString(message.SerializeToString())) == hello


def test_other_values_come_first_and_fields_of_one_side_are_left_out() -> None:
    message = to_proto(w.KvProfile, PROFILE, groups=(), tp=3)
    assert (message.fingerprint, len(message.groups), message.tp) == ("f", 0, 3)
    assert from_proto(Profile, message, groups=(GROUP,)) == replace(PROFILE, groups=(GROUP,))


def test_values_that_the_other_side_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="blue"):
        from_proto(Profile, w.KvProfile(revision="blue"))
    with pytest.raises(ValueError, match="range"):
        to_proto(w.KvGroup, replace(GROUP, heads=-1))
    with pytest.raises(TypeError):
        from_proto(Profile, w.KvGroup())


@dataclass(frozen=True)
class Odd:
    groups: tuple[tuple[int, ...], ...] = ()


def test_a_field_of_another_shape_is_not_left_out_silently() -> None:
    with pytest.raises(TypeError):
        from_proto(Odd, w.KvProfile(groups=[w.KvGroup()]))


def test_event_is_read_back_equal() -> None:
    event = ClusterEvent(time_s=1.5, kind=EventKind.RESTART_PLANNED, subject="prefill-0", reason="exit code −9")
    assert ClusterEvent.from_json(event.to_json().encode()) == event


@pytest.mark.parametrize(
    "text", ["{}", "nonsense", '{"time_s": 1, "kind": "never heard of", "subject": "", "reason": ""}']
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        ClusterEvent.from_json(text)


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
