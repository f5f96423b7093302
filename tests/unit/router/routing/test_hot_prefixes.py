"""Prefixes of a leaving worker that are saved, and the workers that fetch them."""

from __future__ import annotations

import pytest

from tandem.router.routing.cost_model import ASSUMED_BYTES_PER_S, FETCH_SETUP_S
from tandem.router.routing.hot_prefixes import HotPrefix, HotPrefixes, saving
from tandem.router.routing.plan import Candidate
from tests.unit.router.candidates import at, d, m, of_kv, p

KV = of_kv("float32")
TOKEN_BYTES = 2 * 2 * 8 * 4
ROOM = {"profile": KV, "free_blocks": 1000, "prefill_speed": at(5000.0)}
PREFIX = HotPrefix(key=b"k", prompt=[1] * 1601, tokens=1600, salt=b"", model="m")


def held(worker: Candidate, tokens: int = 1600) -> Candidate:
    return Candidate(**{name: getattr(worker, name) for name in worker.__slots__} | {"held_tokens": tokens})


def test_what_nobody_else_has_goes_to_who_computes_prompts() -> None:
    found = saving(PREFIX, held(p("p0", **ROOM)), [d("d0", **ROOM), p("p1", **ROOM)])
    assert found is not None
    assert (found.to.worker, found.token_bytes) == ("p1", TOKEN_BYTES)
    assert found.fetch_s == pytest.approx(FETCH_SETUP_S + 1600 * TOKEN_BYTES / ASSUMED_BYTES_PER_S)


def test_a_decode_worker_takes_it_where_no_other_is() -> None:
    found = saving(PREFIX, held(d("d0", **ROOM)), [d("d1", **ROOM)])
    assert found is not None
    assert found.to.worker == "d1"


def test_who_has_a_part_fetches_the_rest() -> None:
    some = m("m1", reusable_tokens=800, **ROOM)
    found = saving(PREFIX, held(m("m0", **ROOM)), [some])
    assert found is not None
    assert found.fetch_s == pytest.approx(FETCH_SETUP_S + 800 * TOKEN_BYTES / ASSUMED_BYTES_PER_S)


@pytest.mark.parametrize(
    ("leaving", "staying"),
    [
        (p("p0", **ROOM), [p("p1", **ROOM)]),
        (held(p("p0", **ROOM)), []),
        (held(p("p0", **ROOM)), [p("p1", **ROOM), d("d0", reusable_tokens=1600, **ROOM)]),
        (held(p("p0", link_speed=lambda _: 1000.0, **ROOM)), [p("p1", **ROOM)]),
        (held(p("p0", **ROOM)), [p("p1", **{**ROOM, "free_blocks": 150})]),
        (held(p("p0", **ROOM)), [p("p1", **{**ROOM, "profile": of_kv("bfloat16")})]),
    ],
    ids=["it has nothing", "nobody stays", "another has it", "computing is sooner", "no room", "not as exact blocks"],
)
def test_what_is_not_worth_it_stays(leaving: Candidate, staying: list[Candidate]) -> None:
    assert saving(PREFIX, leaving, staying) is None


def test_the_last_prefixes_are_remembered_with_one_token_more() -> None:
    known = HotPrefixes(max_tokens=100)
    known.note(b"", [1] * 32, 0, b"", "m")
    known.note(b"long", [1] * 200, 160, b"", "m")
    assert len(known) == 0
    known.note(b"a", [1] * 40, 32, b"s", "m")
    known.note(b"b", [2] * 32, 32, b"s", "m")
    known.note(b"a", [1] * 50, 32, b"s", "m")
    assert [(one.key, len(one.prompt), one.tokens) for one in known.latest("m")] == [(b"a", 33, 32), (b"b", 32, 32)]
    assert known.latest("another") == []
    known.note(b"c", [3] * 60, 48, b"s", "m")
    assert [one.key for one in known.latest("m")] == [b"c", b"a"]


def test_conversations_that_nobody_else_has_push_nothing_out() -> None:
    known = HotPrefixes()
    for followers in (0.0, 1.0, 2.0):
        known.note(b"system", [1] * 2020, 2000, b"", "m", followers)
    for talk in range(5):
        for turn in range(3):
            known.note(b"%d-%d" % (talk, turn), [talk] * 30_000, 29_984, b"", "m", 0.0)
    assert [one.key for one in known.latest("m")] == [b"system"]
