"""Test the worker table, lookups of prefixes and link speeds."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.block_hash import BlockHash, HashRoot, chain
from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, Rank, WorkerId
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S, KVProfile
from tandem.core.kv_layout import KVLayout
from tandem.core.link_speed import LinkSpeed, ReportedLink
from tandem.core.prefill_queue import FIRST_COME, PrefillSpeed, QueuedWork, QueueRules
from tandem.core.state_enums import RoleName
from tandem.router.routing.observed_traffic import STALE_S, ComputingShare, InFlightWork, Outstanding, Popularity
from tandem.router.routing.plan import Candidate, form, held_tokens
from tandem.router.workers.prefix_lookup import KeptHashes, PrefixFinder
from tandem.router.workers.proto_convert import BlockCounts, ReportedLoad, WorkerFacts, load_from_wire
from tandem.router.workers.table import LinkSpeedView, WorkerTable
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.index.speculation import SETTLED_S, Speculation
from tests.unit.router.facts import facts
from tests.unit.router.stage import Stage

SPEED = PrefillSpeed(tokens_per_s=1000.0, context_s=1e-6)
REPORT = w.LoadReport(
    queued_requests=2, queued_tokens=900, in_flight=5, prefill_rate=1000.0, prefill_context_s=1e-6,
    decode_step_s=0.01, decode_sequence_s=0.001, decoding_sequences=3,
    blocks=[w.GroupBlocksCount(total=100, free=40, cached=20)], queue_stretch=10.0,
    queue_max_overtake_s=30.0, queue=[w.QueuedWork(due_in_s=-1.0, tokens=600, requests=1),
                                      w.QueuedWork(due_in_s=5.0, tokens=300, requests=1, attended=7.0)],
)  # fmt: skip


class Here:
    """A table with one worker, and its only candidate."""

    def __init__(self) -> None:
        nobody: Any = SimpleNamespace()
        self.table = WorkerTable(nobody)
        self.link = _link()
        self.table._links[self.link.worker] = self.link

    def report(self, now_s: float) -> None:
        self.link.load = load_from_wire(REPORT, now_s)
        self.link.outstanding.report(now_s)

    def candidate(self, now_s: float) -> Candidate:
        (one,) = self.table.candidates(now_s=now_s)
        return one


def _link() -> Any:
    return SimpleNamespace(
        worker=WorkerId("p0"), facts=facts("p0", RoleName.PREFILL), load=ReportedLoad(), outstanding=Outstanding(),
        computing=ComputingShare(), is_up=True, is_registered=True, takes_work=True, last_used=4, used_links=(),
    )  # fmt: skip


def test_a_report_as_it_is() -> None:
    here = Here()
    here.report(100.0)
    one = here.candidate(100.05)
    assert one.queue == (QueuedWork(99.0, 600), QueuedWork(105.0, 300, attended=7.0))
    assert one.rules == QueueRules(stretch=10.0, max_overtake_s=30.0)
    assert (one.queued_tokens, one.queued_requests, one.in_flight, one.running) == (900, 2, 5, 3)
    assert (one.free_blocks, one.total_blocks) == (60, 100)
    assert (one.prefill_speed, one.decode_step_s, one.decode_sequence_s) == (SPEED, 0.01, 0.001)


def test_how_much_of_its_time_it_computes_and_what_is_on_its_way() -> None:
    here = Here()
    here.link.computing.share = 0.6
    here.link.outstanding.add("a", InFlightWork(work=QueuedWork(101.0, 50), moved_tokens=50))
    here.report(100.0)
    assert (here.candidate(100.05).computing, here.candidate(100.05).tokens_in_transfer) == (0.6, 0)
    here.link.outstanding.compute("a")
    assert here.candidate(100.06).tokens_in_transfer == 50
    assert here.candidate(102.0).computing == 0.0, "who is silent has nothing to do"


def test_what_was_sent_since_is_added() -> None:
    here = Here()
    here.report(100.0)
    here.link.outstanding.add("a", InFlightWork(work=QueuedWork(101.0, 50), blocks=7))
    here.link.outstanding.add("b", InFlightWork(work=None, blocks=70))
    one = here.candidate(100.05)
    assert (one.queued_tokens, one.queued_requests, one.in_flight, one.free_blocks) == (950, 3, 7, 0)
    assert one.queue[-1] == QueuedWork(101.0, 50)


def test_an_old_report_counts_no_more_but_measurements_do() -> None:
    here = Here()
    here.report(100.0)
    here.link.outstanding.add("a", InFlightWork(work=QueuedWork(101.0, 50)))
    one = here.candidate(100.1 + STALE_S)
    assert (one.queued_tokens, one.queued_requests, one.in_flight, one.running) == (50, 1, 1, 0)
    assert list(one.queue) == [QueuedWork(101.0, 50)]
    assert (one.prefill_speed, one.decode_step_s, one.total_blocks) == (SPEED, 0.01, 100)


def test_impossible_rules_are_first_come_first_served() -> None:
    report = w.LoadReport()
    report.CopyFrom(REPORT)
    report.queue_stretch = float("nan")
    load = load_from_wire(report, 0.0)
    assert load.queue_rules == FIRST_COME
    assert dataclasses.replace(load, blocks=()).total_blocks == 0
    assert load.blocks == (BlockCounts(group=0, total=100, free=40, cached=20, request=0, pushing=0, reserved=0),)


def test_what_is_known_of_workers_is_made_anew_when_it_changes() -> None:
    """Candidates are kept between plans: after any event, they are as if they were not."""
    dice, stage = Random(7), Stage("p0", "p1", "d0", "d1")
    links, names = stage.table.links, [f"r{number}" for number in range(6)]
    rows = QueuedWork(1.0, 40), None

    def happen() -> None:
        link, request = dice.choice(links), dice.choice(names)
        kind = dice.randrange(8)
        if kind == 0:
            link.outstanding.add(request, InFlightWork(work=dice.choice(rows), blocks=dice.randrange(9)))
        elif kind == 1:
            link.outstanding.acknowledge(request)
        elif kind == 2:
            link.outstanding.compute(request)
        elif kind == 3:
            link.outstanding.end(request)
        elif kind == 4:
            link.load = ReportedLoad(in_flight=dice.randrange(9), queued_tokens=dice.randrange(99))
            link.outstanding.report(stage.clock.now_s())
        elif kind == 5:
            stage.table.note_use(link)
        elif kind == 6:
            link.outstanding.clear()
        else:
            stage.clock.advance(dice.choice((0.01, STALE_S)))

    changed = 0
    before = stage.table.candidates(None, stage.clock.now_s())
    for _ in range(2000):
        happen()
        now_s = stage.clock.now_s()
        kept = stage.table.candidates(None, now_s)
        stage.table._kept.clear()
        assert kept == stage.table.candidates(None, now_s)
        changed += kept != before
        before = kept
    assert changed > 500


PROMPT = list(range(100, 196))
SALT = b"tenant"


class Held:
    """An index in which each worker holds so many leading blocks under one root; counts how often it is asked."""

    def __init__(self, *held: tuple[str, int, int, str]) -> None:
        self.lookups = 0
        self._held: dict[BlockHash, set[WorkerId]] = {}
        for worker, block_tokens, blocks, lossy in held:
            root = HashRoot(fingerprint="f", block_tokens=block_tokens, salt=SALT, lossy=lossy).digest()
            for block in chain(root, PROMPT, block_tokens)[:blocks]:
                self._held.setdefault(block, set()).add(WorkerId(worker))

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        self.lookups += 1
        counts: dict[WorkerId, int] = {}
        for depth, block in enumerate(hashes):
            for worker in self._held.get(block, ()):
                if counts.get(worker, 0) == depth:
                    counts[worker] = depth + 1
        return counts


def test_every_worker_is_asked_in_blocks_of_its_own_size() -> None:
    index = Held(("p0", 16, 3, ""), ("d0", 8, 5, ""), ("d1", 24, 4, ""))
    workers = [
        facts("p0", RoleName.PREFILL), facts("d0", RoleName.DECODE, 8), facts("d1", RoleName.DECODE, 24),
        facts("d2", RoleName.DECODE, 24),
    ]  # fmt: skip
    view = PrefixFinder(index, SALT).find(PROMPT, workers)
    assert view.held_tokens == {"p0": 48, "d0": 40, "d1": 96}
    assert view.reusable_tokens == {"p0": 48, "d0": 40, "d1": 72}  # the last token is computed again
    assert view.lossy_tokens == {}
    assert index.lookups == 3
    for worker in workers:
        root = HashRoot(fingerprint="f", block_tokens=worker.block_tokens, salt=SALT).digest()
        assert view.last_hashes[worker.worker] == chain(root, PROMPT, worker.block_tokens)[-1]


def test_what_came_changed_is_looked_up_under_its_own_root() -> None:
    index = Held(("d0", 16, 2, ""), ("d0", 16, 5, "float32>bfloat16"), ("d1", 16, 3, ""), ("d1", 16, 4, "int8"))
    always: dict[str, Any] = {"offers": ("int8",), "offers_below_bytes_per_s": ALWAYS_BYTES_PER_S}
    workers = [
        facts("p0", RoleName.PREFILL), facts("p1", RoleName.PREFILL), facts("p2", RoleName.PREFILL, **always),
        facts("d0", RoleName.DECODE, dtype="bfloat16"), facts("d1", RoleName.DECODE),
    ]  # fmt: skip
    view = PrefixFinder(index, SALT).find(PROMPT, workers)
    assert view.held_tokens == {"d0": 32, "d1": 48}
    assert view.lossy_tokens == {"d0": {"float32>bfloat16": 80}, "d1": {"int8": 64}}
    assert index.lookups == 4  # one a root, for all workers


def test_without_an_index_and_with_a_short_prompt() -> None:
    view = PrefixFinder(None, SALT).find([1, 2, 3], [facts("d0", RoleName.DECODE)])
    assert (view.held_tokens, view.last_hashes) == ({}, {"d0": b""})


def test_a_burst_finds_what_the_first_of_it_was_sent_for() -> None:
    index, clock = Held(("p1", 16, 1, "")), ManualClock()
    finder = PrefixFinder(index, SALT, speculation=Speculation(clock))
    p0, p1, d0 = facts("p0", RoleName.PREFILL), facts("p1", RoleName.PREFILL), facts("d0", RoleName.DECODE)
    finder.expect("first", p0, finder.find(PROMPT, [p0, p1, d0]))
    longer = [*PROMPT, *range(40)]
    view = finder.find(longer, [p0, p1, d0])
    assert view.held_tokens == {"p1": 16}  # expected blocks are never asked for
    assert view.reusable_tokens == {"p0": 96, "p1": 16}
    assert view.expected_tokens == {"p0": 96}
    assert finder.find(PROMPT, [p0]).reusable_tokens == {"p0": 80}  # the last token is computed again
    reborn = facts("p0", RoleName.PREFILL, incarnation=2)
    assert finder.find(PROMPT, [reborn]).reusable_tokens == {}
    finder.withdraw("first", p0.worker)
    assert finder.find(longer, [p0]).reusable_tokens == {}


def test_who_else_begins_with_what_is_held_is_counted() -> None:
    """By the held part of the prompt; only sent prompts count, and not those without any held block."""
    clock = ManualClock()
    finder = PrefixFinder(Held(("p0", 16, 4, "")), SALT, popularity=Popularity(clock))
    p0 = facts("p0", RoleName.PREFILL)
    for own in range(3):
        view = finder.find([*PROMPT[:64], *range(1000 * own, 1000 * own + 32)], [p0])
        assert view.followers == own
        finder.expect(str(own), p0, view)
    assert finder.find(PROMPT, [p0]).followers == 3
    assert finder.find(PROMPT[:40], [p0]).followers == 0
    nobody = PrefixFinder(None, SALT, popularity=Popularity(clock))
    nobody.expect("new", p0, nobody.find(PROMPT, [p0]))
    assert nobody.find(PROMPT, [p0]).followers == 0


def test_what_the_index_shows_is_not_expected_again() -> None:
    index, clock = Held(("p0", 16, 6, "")), ManualClock()
    speculation = Speculation(clock)
    finder = PrefixFinder(index, SALT, speculation=speculation)
    p0 = facts("p0", RoleName.PREFILL)
    finder.expect("held", p0, finder.find(PROMPT, [p0]))
    assert speculation.blocks == 0
    finder.expect("longer", p0, finder.find([*PROMPT, *range(16)], [p0]))
    finder.settle("longer", p0.worker)
    assert speculation.blocks == 7
    clock.advance(SETTLED_S)
    assert finder.find([*PROMPT, *range(40)], [p0]).reusable_tokens == {"p0": 96}


def test_a_prompt_that_is_computed_whole_reuses_nothing_but_is_held_all_the_same() -> None:
    index = Held(("p0", 16, 3, ""), ("d0", 16, 5, ""))
    view = PrefixFinder(index, SALT).find(PROMPT, [facts("p0", RoleName.PREFILL), facts("d0", RoleName.DECODE)])
    whole = view.computed_whole()
    assert (view.reusable_tokens, whole.reusable_tokens) == ({"p0": 48, "d0": 80}, {})
    assert (whole.held_tokens, whole.last_hashes) == (view.held_tokens, view.last_hashes)


def test_a_prompt_is_hashed_once_however_often_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(root: BlockHash, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
        hashed.append(block_tokens)
        return chain(root, tokens, block_tokens)

    monkeypatch.setattr("tandem.router.workers.prefix_lookup.chain", counted)
    finder, kept = PrefixFinder(Held(("p0", 16, 3, "")), SALT), KeptHashes()
    first = finder.find(PROMPT, [facts("p0", RoleName.PREFILL)], kept=kept)
    again = finder.find(PROMPT, [facts("p0", RoleName.PREFILL), facts("p1", RoleName.PREFILL)], kept=kept)
    assert hashed == [16]
    assert again.held_tokens == {"p0": 48}
    assert again.hashes[WorkerId("p1")] == first.hashes[WorkerId("p0")]
    finder.find(PROMPT, [facts("p2", RoleName.PREFILL, 8)], kept=kept)
    assert hashed == [16, 8]


TCP = LinkSpeed(from_host="a", to_host="b", transport="tcp", peer="d0", bytes_per_s=1e9)
USED = ReportedLink(
    rank=Rank(0), peer=WorkerId("d0"), peer_rank=Rank(0), transport="grpc", from_host="a", to_host="b", bytes_per_s=5e7,
    latency_s=1e-4, achieved_bytes_per_s=0.0, stalls=0, reason="", unused=(),
)  # fmt: skip


@dataclass(frozen=True)
class End:
    facts: WorkerFacts | None
    used_links: Sequence[ReportedLink] = ()


def end(name: str, host: str, *links: ReportedLink, transports: tuple[str, ...] = ("tcp", "grpc")) -> End:
    profile = KVProfile(fingerprint="f", identity=(), layout=KVLayout(groups=()))
    facts = WorkerFacts(
        worker=WorkerId(name), incarnation=Incarnation(1), role=RoleName.PREFILL, address="", model="m",
        fingerprint="f", tp=1, block_tokens=16, kv_dtype="float32", max_model_len=100, vocab_size=100,
        num_blocks=(9,), token_kv_bytes=1, transports=transports, protocol=2, eos_token_ids=(), pid=1, rank_pids=(),
        profile=profile, host=host,
    )  # fmt: skip
    return End(facts, links)


def test_the_link_in_use_counts_before_what_the_hosts_could_do() -> None:
    view = LinkSpeedView()
    p0, d0 = end("p0", "a"), end("d0", "b")
    assert view.bytes_per_s(p0, d0) is None
    view.set_rows([TCP, replace(TCP, transport="shm", bytes_per_s=9e9), replace(TCP, transport="grpc", failure="no")])
    assert view.bytes_per_s(p0, d0) == 1e9  # neither end has shm
    assert view.bytes_per_s(d0, p0) is None
    assert view.bytes_per_s(end("p0", "a", USED), d0) == 5e7
    assert view.bytes_per_s(end("p0", "a", replace(USED, rank=Rank(1)), replace(USED, bytes_per_s=0.0)), d0) == 1e9
    assert view.bytes_per_s(end("p0", "a", USED), end("d1", "b")) == 1e9  # that link goes to d0
    assert view.bytes_per_s(None, d0) is None
    assert view.bytes_per_s(End(None), d0) is None
    view.set_rows([])
    assert view.bytes_per_s(p0, d0) is None


def test_the_usual_link_is_in_the_middle_of_those_that_were_measured() -> None:
    view = LinkSpeedView()
    mixed, d1 = end("m0", "a"), end("d1", "c")
    senders, receivers = (
        [end("p0", "a", USED), end("p1", "b"), mixed, End(None)],
        [end("d0", "b"), d1, mixed, End(None)],
    )
    assert view.median(senders, []) == 0.0
    assert view.median(senders[1:], receivers) == 0.0
    assert view.median(senders, receivers) == 5e7, "p0 to d0"
    assert view.median([end("p0", "a", replace(USED, bytes_per_s=float("inf")))], receivers) == 0.0
    view.set_rows([TCP, replace(TCP, to_host="c", bytes_per_s=3e9), replace(TCP, from_host="b", failure="no")])
    assert view.median(senders, receivers) == 2e9, "and 3 GB/s of p0 to d1, 1 and 3 of m0; none to itself, none from b"


@pytest.mark.parametrize(("speed", "expected"), [(None, "exact"), (2e8, "exact"), (5e7, "codec int8")])
def test_plans_know_which_links_are_slow_enough_for_a_codec(speed: float | None, expected: str) -> None:
    profile = KVProfile(fingerprint="f", identity=(), layout=KVLayout(groups=()))
    sender = replace(profile, offers=("int8",), offers_below_bytes_per_s=125e6)
    fields: dict[str, Any] = {"incarnation": Incarnation(1)}
    prefill = Candidate(
        worker=WorkerId("p0"), role=RoleName.PREFILL, profile=sender, link_speed=lambda _: speed, **fields
    )
    decode = Candidate(
        worker=WorkerId("d0"), role=RoleName.DECODE, profile=profile, held_tokens=48, lossy_tokens={"int8": 16},
        **fields,
    )  # fmt: skip
    assert form(prefill, decode) == expected
    assert held_tokens(prefill, decode) == (48 if expected == "exact" else 16)


def test_links_of_a_load_report() -> None:
    report = w.LoadReport(
        links=[w.LinkReport(rank=1, peer="d0", transport="tcp", bytes_per_s=2.0, stalls=3, reason="r", unused=["u"])]
    )
    (link,) = load_from_wire(report, 0.0).links
    assert (link.rank, link.peer, link.transport, link.bytes_per_s, link.stalls) == (1, "d0", "tcp", 2.0, 3)
    assert (link.reason, link.unused) == ("r", ("u",))
