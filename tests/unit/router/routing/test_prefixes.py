"""Test hot prefixes, their popularity, sources of fetches and affinity."""

from collections import Counter
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.config import Disaggregation
from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S, KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.prefill_queue import ASSUMED_TOKENS_PER_S
from tandem.core.state_enums import RoleName
from tandem.router.routing.cost_model import ASSUMED_BYTES_PER_S, FETCH_SETUP_S, MAX_SOURCES, with_sources
from tandem.router.routing.observed_traffic import LASTING_S, HotPrefix, HotPrefixes, Popularity, saving
from tandem.router.routing.plan import AFFINITY_REQUESTS, AFFINITY_TOKENS, Candidate, Job, Plan, with_affinity
from tandem.router.routing.policies.cost import CostPolicy
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


def test_a_steady_rate_is_counted_and_fades() -> None:
    clock = ManualClock()
    popularity = Popularity(clock)
    for _ in range(4000):
        popularity.count(b"system")
        clock.advance(0.1)
    assert popularity.followers(b"system") == pytest.approx(10 * LASTING_S, rel=0.01)
    clock.advance(LASTING_S)
    assert popularity.followers(b"system") == pytest.approx(10 * LASTING_S / 2.71828, rel=0.01)
    assert popularity.followers(b"another") == 0.0


def test_nothing_held_is_not_counted() -> None:
    popularity = Popularity(ManualClock())
    popularity.count(b"")
    assert len(popularity) == 0


def test_the_least_recent_prefix_goes_first() -> None:
    popularity = Popularity(ManualClock(), max_prefixes=2)
    for prefix in (b"a", b"b", b"a", b"c"):
        popularity.count(prefix)
    assert [popularity.followers(prefix) for prefix in (b"a", b"b", b"c")] == [2.0, 0.0, 1.0]


KV_TOKEN_BYTES = 2 * 2 * 4 * 8 * 4  # layers, planes, heads, width, bytes


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
        speed = tokens * KV_TOKEN_BYTES / (compute_s * margin - FETCH_SETUP_S)
        found = sources(worker("p0", prefill_speed=at(rate)), worker("d0", tokens, speed))
    else:  # then the rate at which both cost the same follows from the assumed speed
        fetch_s = FETCH_SETUP_S + tokens * KV_TOKEN_BYTES / ASSUMED_BYTES_PER_S
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


ROLES = (RoleName.PREFILL, RoleName.DECODE)


def workers(role: RoleName, count: int, **of: dict[str, Any]) -> list[Candidate]:
    names = [f"{role.value}-{number}" for number in range(count)]
    return [
        Candidate(worker=WorkerId(n), incarnation=Incarnation(1), role=role, last_used=number, **of.get(n, {}))
        for number, n in enumerate(names)
    ]


def plan(key: str, **of: dict[str, Any]) -> Plan:
    able = with_affinity(key, [candidate for role in ROLES for candidate in workers(role, 4, **of)])
    job = Job(prompt_tokens=100, max_tokens=10, is_kept_together=bool(key))
    return CostPolicy(Disaggregation.ALWAYS).plan(job, able)


def homes(key: str, candidates: list[Candidate]) -> set[WorkerId]:
    seen = with_affinity(key, candidates)
    return {after.worker for before, after in zip(candidates, seen, strict=True) if after == before}


def test_one_key_one_pair_and_keys_spread() -> None:
    for key in ("a", "b", "c"):
        home = plan(key).workers
        # Independent of the worker used last, and of slightly lower load elsewhere.
        busy = {worker: {"queued_tokens": AFFINITY_TOKENS - 1, "in_flight": AFFINITY_REQUESTS - 1} for worker in home}
        assert plan(key, **busy).workers == home
    counts = Counter(plan(str(number)).workers for number in range(400))
    assert len(counts) == 16
    assert max(counts.values()) < 3 * 400 / 16
    assert plan("").workers == ("prefill-0", "decode-0")


def test_load_comes_first() -> None:
    prefill, decode = plan("a").workers
    assert plan("a", **{prefill: {"queued_tokens": AFFINITY_TOKENS + 1}}).prefill != prefill
    elsewhere = plan("a", **{decode: {"in_flight": AFFINITY_REQUESTS + 1}})
    assert elsewhere.prefill == prefill
    assert elsewhere.decode != decode


@pytest.mark.parametrize("gone", range(4))
def test_a_worker_that_leaves_moves_only_its_own_keys(gone: int) -> None:
    every = workers(RoleName.MIXED, 4)
    left = [candidate for number, candidate in enumerate(every) if number != gone]
    moved = 0
    for number in range(200):
        before, after = homes(str(number), every), homes(str(number), left)
        assert len(before) == len(after) == 1
        if before != after:
            moved += 1
            assert before == {every[gone].worker}
    assert 0 < moved < 100
