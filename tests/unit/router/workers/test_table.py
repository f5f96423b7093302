"""A candidate's load: its worker's last report, requests sent since, and no report that is too old."""

from __future__ import annotations

import dataclasses
from random import Random
from types import SimpleNamespace
from typing import Any

from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.prefill_queue import FIRST_COME, PrefillSpeed, QueuedWork, QueueRules
from tandem.router.routing.inflight_load import STALE_S, InFlightWork, Outstanding
from tandem.router.routing.plan import Candidate
from tandem.router.routing.prefill_utilization import ComputingShare
from tandem.router.workers.proto_convert import BlockCounts, ReportedLoad, load_from_wire
from tandem.router.workers.table import WorkerTable
from tandem.rpc.v1 import worker_pb2 as w
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
