"""Sources from which a worker fetches blocks that it would otherwise compute."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S, KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.lifecycle import RoleName
from tandem.core.prefill_queue import ASSUMED_TOKENS_PER_S
from tandem.router.routing.cost_model import ASSUMED_BYTES_PER_S, FETCH_SETUP_S, MAX_SOURCES
from tandem.router.routing.fetch_sources import with_sources
from tandem.router.routing.plan import Candidate, Job, Plan
from tests.unit.router.candidates import at

TOKEN_BYTES = 2 * 2 * 4 * 8 * 4  # layers, planes, heads, width, bytes


def profile(block_tokens: int = 16, dtype: str = "float32", fingerprint: str = "f", **more: Any) -> KVProfile:
    group = KVGroupSpec(
        group=GroupId(0), layers=(0, 1), planes=2, heads=4, width=8, block_tokens=block_tokens, dtype=dtype
    )
    return KVProfile(fingerprint=fingerprint, identity=(), layout=KVLayout(groups=(group,)), **more)


def worker(name: str, held: int = 0, speed: float | None = None, **more: Any) -> Candidate:
    role = RoleName.PREFILL if name[0] == "p" else RoleName.DECODE
    more.setdefault("profile", profile())
    return Candidate(
        worker=WorkerId(name), incarnation=Incarnation(1), role=role, held_tokens=held,
        link_speed=lambda to: speed, **more,
    )  # fmt: skip


def sources(*candidates: Candidate, prompt: int = 4097, is_whole: bool = False) -> list[tuple[str, int]]:
    plan = Plan(decode=WorkerId("d0"), prefill=None if is_whole else WorkerId("p0"), reason="")
    found = with_sources(plan, Job(prompt_tokens=prompt, max_tokens=9), candidates).sources
    return [(source.worker, source.tokens) for source in found]


def test_the_decode_worker_that_holds_the_answer() -> None:
    assert sources(worker("p0", reusable_tokens=1024), worker("d0", 4096)) == [("d0", 4096)]
    assert sources(worker("p0", reusable_tokens=4096), worker("d0", 4096)) == []
    assert sources(worker("p0"), worker("d0")) == []
    assert sources(worker("p0"), worker("d0"), worker("d1", 4096), is_whole=True) == [("d1", 4096)]
    assert sources(worker("p1", 4096), worker("d0", 4096)) == [], "the worker that computes is not here"


def test_who_has_more_fetches_nothing_however_slow_the_link() -> None:
    assert sources(worker("p0", reusable_tokens=4096), worker("d0", 2048, 1e3)) == []
    assert sources(worker("p0", reusable_tokens=4096, profile=profile()), worker("d0", 4096, 1e3)) == []


def test_one_token_is_worth_a_fetch_where_it_takes_a_second() -> None:
    small = profile(block_tokens=1)
    slow = worker("p0", profile=small, prefill_speed=at(1.0))
    assert sources(slow, worker("d0", 1, profile=small), prompt=2) == [("d0", 1)]


def test_the_last_token_is_always_computed() -> None:
    """65 tokens held of a prompt of 64: three blocks can be used, and those it has."""
    assert sources(worker("p0", reusable_tokens=48, prefill_speed=at(100.0)), worker("d0", 64), prompt=64) == []
    found = sources(worker("p0", reusable_tokens=32, prefill_speed=at(100.0)), worker("d0", 64), prompt=64)
    assert found == [("d0", 64)]


def test_blocks_of_the_worker_that_computes_count() -> None:
    large = worker("p0", profile=profile(block_tokens=1000), prefill_speed=at(1.0))
    assert sources(large, worker("d0", 992)) == []
    assert sources(large, worker("d0", 1008)) == [("d0", 1008)]


@pytest.mark.parametrize(("margin", "is_fetched"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("is_measured", [True, False])
def test_fetched_if_that_is_sooner(margin: float, is_fetched: bool, is_measured: bool) -> None:
    tokens = 2048
    if is_measured:
        rate, compute_s = 20_000.0, tokens / 20_000.0
        speed = tokens * TOKEN_BYTES / (compute_s * margin - FETCH_SETUP_S)
        found = sources(worker("p0", prefill_speed=at(rate)), worker("d0", tokens, speed))
    else:  # then the rate at which both cost the same follows from the assumed speed
        fetch_s = FETCH_SETUP_S + tokens * TOKEN_BYTES / ASSUMED_BYTES_PER_S
        found = sources(worker("p0", prefill_speed=at(tokens / fetch_s * margin)), worker("d0", tokens))
    assert bool(found) == is_fetched


def test_a_worker_that_never_computed() -> None:
    assert ASSUMED_TOKENS_PER_S == 5000
    assert sources(worker("p0"), worker("d0", 4096))
    assert not sources(worker("p0"), worker("d0", 32)), "two blocks are computed sooner than asked for"


def test_the_one_that_saves_most_first() -> None:
    found = sources(
        worker("p0"), worker("d0", 2048), worker("d1", 4096, 4e6), worker("d2", 4096), worker("d3", 4096, 1e9)
    )
    assert [name for name, _ in found] == ["d3", "d2", "d0"]
    assert len(found) == MAX_SOURCES
    itself = worker("p0", 4090)  # it decoded what it cannot reuse
    found = sources(itself, worker("d0", 2048), worker("d1", 2064), worker("d2", 4080))
    assert [name for name, _ in found] == ["d2", "d1", "d0"]


@pytest.mark.parametrize(
    "theirs",
    [
        profile(fingerprint="g"),
        profile(dtype="bfloat16"),
        profile(offers=("int8",), offers_below_bytes_per_s=ALWAYS_BYTES_PER_S),
        None,
    ],
    ids=["another model", "converted", "codec", "unknown"],
)
def test_only_exact_copies(theirs: KVProfile | None) -> None:
    assert sources(worker("p0"), worker("d0", 4096, profile=theirs)) == []


def test_workers_that_keep_no_kv_have_nothing_to_fetch() -> None:
    nothing = KVProfile(fingerprint="f", identity=(), layout=KVLayout(groups=()))
    assert sources(worker("p0", profile=nothing), worker("d0", 4096, profile=nothing)) == []


def test_other_block_sizes_are_exact() -> None:
    assert sources(worker("p0"), worker("d0", 4096, profile=profile(block_tokens=32))) == [("d0", 4096)]
