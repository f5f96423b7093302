"""Sent requests count from the first moment, once, and until the worker reports their outcome."""

from __future__ import annotations

from typing import Any

from tandem.core.prefill_queue import ASSUMED_TOKENS_PER_S, QueuedWork, QueueRules, attended
from tandem.router.routing.inflight_load import STALE_S, InFlightWork, Outstanding, sent
from tandem.router.routing.plan import Job
from tests.unit.router.candidates import at


def prompt(tokens: int) -> InFlightWork:
    return InFlightWork(work=QueuedWork(1.0, tokens), blocks=1)


def test_counted_at_once_and_no_more_when_a_report_counts_it() -> None:
    outstanding = Outstanding()
    outstanding.report(10.0)
    outstanding.add("a", prompt(100))
    assert [work.tokens for work in outstanding.queue(10.0)] == [100]
    outstanding.report(10.1)
    assert outstanding.queue(10.1), "the worker had not got it when it wrote this report"
    outstanding.acknowledge("a")
    assert outstanding.queue(10.15), "no report since"
    outstanding.report(10.2)
    assert (outstanding.queue(10.2), outstanding.uncounted(10.2)) == ([], [])
    outstanding.add("b", prompt(7))
    assert [work.tokens for work in outstanding.queue(10.25)] == [7]


def test_a_stale_report_counts_no_more_and_own_dispatches_do() -> None:
    outstanding = Outstanding()
    assert outstanding.is_stale(0.0), "there was none"
    outstanding.add("a", prompt(100))
    outstanding.acknowledge("a")
    outstanding.report(10.0)
    assert not outstanding.is_stale(10.0 + STALE_S)
    late_s = 10.1 + STALE_S
    assert outstanding.is_stale(late_s)
    assert [work.tokens for work in outstanding.queue(late_s)] == [100]
    assert outstanding.compute("a")
    assert not outstanding.compute("a"), "only once"
    assert (outstanding.queue(late_s), len(outstanding.uncounted(late_s))) == ([], 1)


def test_ends_leave_nothing() -> None:
    outstanding = Outstanding()
    for name in ("a", "b"):
        outstanding.add(name, InFlightWork(work=None))
    outstanding.end("a")
    outstanding.end("a")
    for of_nobody in (outstanding.acknowledge, outstanding.compute):
        of_nobody("a")
    assert (len(outstanding), outstanding.queue(0.0)) == (1, [])
    outstanding.report(5.0)
    outstanding.clear()
    assert (len(outstanding), outstanding.is_stale(5.0)) == (0, True)


def test_what_a_leg_counts_as() -> None:
    job = Job(prompt_tokens=1000, max_tokens=9, choices=2, now_s=50.0, deadline_s=650.0)
    there: dict[str, Any] = {"held_tokens": 200, "block_tokens": 16, "rules": QueueRules(stretch=10.0)}
    decoding = sent(job, known_tokens=None, speed=at(0.0), **there)
    assert (decoding.work, decoding.blocks) == (None, 50 + 2)
    assert sent(job, known_tokens=500, speed=at(1000.0), **there).work == QueuedWork(
        55.0, 500, attended=attended(500, 1000)
    )
    assert sent(job, known_tokens=1000, speed=at(1.0), **there).work == QueuedWork(60.0, 1, attended=999.5), (
        "the last token is computed"
    )
    unknown = sent(job, known_tokens=0, speed=at(0.0), **there).work
    assert unknown == QueuedWork(50.0 + 10 * 1000 / ASSUMED_TOKENS_PER_S, 1000, attended=500_000.0)
    slowly = sent(job, known_tokens=500, speed=at(1000.0, 1e-6), **there).work
    assert slowly is not None
    assert slowly.due_s == 50.0 + 10 * (0.5 + 375_000 * 1e-6)


def test_kv_is_on_its_way_from_the_first_token_to_the_next_one() -> None:
    """At the worker that computed it until that one is let go, at the other until its own first token."""
    sender, receiver = Outstanding(), Outstanding()
    sender.add("a", InFlightWork(work=QueuedWork(1.0, 100), moved_tokens=100))
    receiver.add("a", InFlightWork(work=None, moved_tokens=100))
    sender.add("b", InFlightWork(work=QueuedWork(1.0, 7)))
    assert (sender.tokens_in_transfer, receiver.tokens_in_transfer) == (0, 0), "not computed yet"
    before = receiver.changes
    for name in ("a", "b"):
        assert sender.compute(name)
        receiver.depart(name)
    assert (sender.tokens_in_transfer, receiver.tokens_in_transfer) == (100, 100)
    assert receiver.changes > before, "a plan that was made of it is out of date"
    sender.end("a")
    assert not receiver.compute("a")
    receiver.depart("a")
    assert (sender.tokens_in_transfer, receiver.tokens_in_transfer) == (0, 0)
    receiver.add("c", InFlightWork(work=None, moved_tokens=5))
    receiver.depart("c")
    receiver.clear()
    assert receiver.tokens_in_transfer == 0
