"""Admission on a clock of its own: requests sent at once, queued, or refused with Retry-After."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.core.config import AdmissionSection
from tandem.core.errors import CapacityError, DeadlineError, InternalError, TandemError, UnavailableError
from tandem.core.ids import WorkerId
from tandem.router.admission.admission_controller import (
    ASK_EVERY_S,
    MARGIN,
    AdmissionController,
    QueuedRequest,
)
from tandem.router.admission.slo_classes import SloTerms


@dataclass
class Counts:
    waits: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def waited(self, seconds: float) -> None:
        self.waits.append(seconds)

    def refused(self, reason: str) -> None:
        self.reasons.append(reason)


class Hall:
    """An admission with workers that take `room` more requests; `sent` are the names of those that went."""

    def __init__(self, room: int = 0, **rules: Any) -> None:
        self.clock, self.counts, self.room = ManualClock(100.0), Counts(), room
        self.has_room_for: Callable[[QueuedRequest], bool] = lambda need: False
        self.sent: list[str] = []
        self.errors: dict[str, TandemError] = {}
        self.started = 0
        self.stranded: dict[str, int] = {}
        self.alone: WorkerId | None = None
        self.places = 0
        self.asked = 0
        self.is_broken = False
        self.admission = AdmissionController(
            AdmissionSection(**rules), self.clock, self._has_room, self.counts, on_waiting=self._on_waiting,
            has_place=lambda worker, need: self.places > 0, stranded=lambda model: self.stranded.get(model, 0),
        )  # fmt: skip

    def _alone(self, waiting: int) -> WorkerId | None:
        self.asked += 1
        assert waiting == self.admission.waiting - 1
        if self.is_broken:
            raise RuntimeError("an error of ours")
        return self.alone

    def _has_room(self, model: str, need: QueuedRequest) -> bool:
        return self.room > 0 or self.has_room_for(need)

    def _on_waiting(self) -> None:
        self.started += 1

    def grant(self, name: str, error: Exception | None) -> Callable[[], None]:
        def run() -> None:
            if error is not None:
                raise error
            self.room -= 1
            self.sent.append(name)

        return run

    def enter(
        self, name: str, *, tenant: str = "a", cost: int = 100, compute_s: float = 0.1, ttft_s: float = math.inf,
        timeout_s: float = 600.0, priority: int = 0, model: str = "", error: Exception | None = None,
    ) -> QueuedRequest | None:  # fmt: skip
        now_s = self.clock.now_s()

        def refuse(failure: TandemError) -> None:
            assert name not in self.errors
            self.errors[name] = failure

        request = QueuedRequest(
            terms=SloTerms(tenant=tenant, ttft_s=ttft_s, priority=priority), prompt_tokens=10, choices=1, cost=cost,
            arrived_s=now_s, deadline_s=now_s + timeout_s, model=model, grant=self.grant(name, error), refuse=refuse,
            compute_time=lambda: compute_s, alone=self._alone,
        )  # fmt: skip
        return request if self.admission.enter(request) else None

    def pass_time(self, seconds: float, room: int = 0) -> None:
        self.clock.advance(seconds)
        self.room += room
        self.admission.pump()


def test_with_room_and_nobody_waiting_it_goes_at_once() -> None:
    hall = Hall(room=1)
    assert hall.enter("first") is None
    assert hall.sent == ["first"]
    assert hall.enter("second") is not None
    assert (hall.sent, hall.admission.waiting, hall.started) == (["first"], 1, 1)


def test_what_overtakes_at_a_worker_goes_at_once() -> None:
    hall = Hall()
    hall.has_room_for = lambda need: need.compute_s is not None and need.compute_s < 0.1
    assert hall.enter("short", compute_s=0.01) is None
    assert hall.enter("long", compute_s=1.0) is not None
    assert (hall.sent, hall.admission.waiting) == (["short"], 1)
    assert hall.enter("another", compute_s=0.01) is not None, "nobody passes those that wait"


def test_whose_turn_it_is_is_served_whole_where_that_is_better() -> None:
    hall = Hall()
    hall.alone, hall.places = WorkerId("d0"), 1
    for number in range(3):
        hall.enter(str(number))
    assert hall.sent == []
    hall.pass_time(0.005)
    assert (hall.sent, hall.admission.waiting) == (["0", "1", "2"], 0), "in the order of the queue"


def test_nobody_is_sent_to_a_worker_that_has_no_place_or_that_it_is_no_better_at() -> None:
    hall = Hall()
    hall.enter("0")
    hall.alone = WorkerId("d0")
    hall.pass_time(0.005)
    assert (hall.sent, hall.asked) == ([], 1)
    hall.alone, hall.places = None, 1
    hall.pass_time(ASK_EVERY_S / 2)
    assert hall.asked == 1, "it was asked just now"
    hall.pass_time(ASK_EVERY_S)
    assert (hall.sent, hall.asked) == ([], 2)


def test_an_error_of_ours_while_that_is_asked_holds_nobody_up() -> None:
    hall = Hall()
    hall.is_broken = True
    for number in range(8):
        hall.enter(str(number))
    hall.pass_time(0.005)
    hall.pass_time(0.005, room=3)
    assert (hall.sent, hall.asked, hall.errors) == (["0", "1", "2"], 1, {})


def test_what_going_at_once_raises_reaches_the_caller() -> None:
    with pytest.raises(UnavailableError):
        Hall(room=1).enter("x", error=UnavailableError("no worker"))


def test_nobody_passes_those_that_wait() -> None:
    hall = Hall()
    hall.enter("first")
    hall.room = 1
    hall.enter("second")
    assert hall.sent == []
    hall.pass_time(0.5)
    assert (hall.sent, hall.counts.waits) == (["first"], [0.5])
    hall.pass_time(0.0, room=1)
    assert (hall.sent, hall.admission.waiting) == (["first", "second"], 0)


def test_models_do_not_wait_for_each_other() -> None:
    hall = Hall()
    hall.enter("first", model="m")
    hall.room = 1
    assert hall.enter("second", model="n") is None


def test_a_failure_to_send_is_told_to_its_client_and_the_next_one_goes() -> None:
    hall = Hall()
    hall.enter("bad", error=UnavailableError("no worker fits"))
    hall.enter("good")
    hall.pass_time(0.1, room=1)
    assert isinstance(hall.errors["bad"], UnavailableError)
    assert hall.sent == ["good"]


def test_an_error_of_our_own_is_told_to_its_client_too_and_the_next_one_goes() -> None:
    hall = Hall()
    hall.enter("bad", error=RuntimeError("a bug"))
    hall.enter("good")
    hall.pass_time(0.1, room=1)
    assert isinstance(hall.errors["bad"], InternalError)
    assert hall.sent == ["good"]


def test_while_no_worker_is_there_no_more_are_let_in_than_may_wait() -> None:
    hall = Hall(room=9, max_waiting=2)
    hall.stranded = {"m": 1, "n": 2}
    assert hall.enter("first", model="m") is None
    with pytest.raises(CapacityError, match="no worker can serve them") as refused:
        hall.enter("second", model="n")
    assert refused.value.retry_after_s == 1.0
    assert (hall.sent, hall.counts.reasons) == (["first"], ["full"])


def test_short_prompts_and_urgent_ones_come_first_within_a_tenant() -> None:
    hall = Hall()
    hall.enter("long", compute_s=1.0)
    hall.enter("short", compute_s=0.01)
    hall.enter("urgent", compute_s=0.01, priority=-5)
    hall.enter("late", compute_s=0.01, priority=50)
    hall.pass_time(0.0, room=4)
    assert hall.sent == ["urgent", "short", "long", "late"]


def test_a_less_urgent_one_is_not_overtaken_for_ever() -> None:
    hall = Hall()
    hall.enter("patient", compute_s=0.01, priority=5)
    hall.pass_time(6.0)
    hall.enter("new", compute_s=0.01)
    hall.pass_time(0.0, room=1)
    assert hall.sent == ["patient"]


def test_a_greedy_tenant_gets_its_share_and_no_more() -> None:
    hall = Hall(quantum_tokens=100)
    for number in range(50):
        hall.enter(f"greedy {number}", tenant="greedy")
    for number in range(5):
        hall.enter(f"modest {number}", tenant="modest")
    hall.pass_time(0.0, room=10)
    assert sum(name.startswith("modest") for name in hall.sent) == 5


def test_who_sends_less_than_its_share_has_its_burst_served_at_once() -> None:
    hall = Hall(quantum_tokens=100, saved_tokens=300)
    for number in range(50):
        hall.enter(f"greedy {number}", tenant="greedy")
    hall.pass_time(0.0, room=10)
    for number in range(3):
        hall.enter(f"modest {number}", tenant="modest")
    hall.pass_time(0.0, room=5)
    assert [name.split()[0] for name in hall.sent[10:]] == ["modest"] * 3 + ["greedy"] * 2


def test_after_a_long_calm_a_tenant_has_its_savings_again() -> None:
    for calm_s, expected in ((1.0, "greedy"), (6.0, "modest")):
        hall = Hall(quantum_tokens=100, saved_tokens=100)
        hall.enter("modest 0", tenant="modest")
        hall.pass_time(0.0, room=1)
        hall.pass_time(calm_s, room=0)
        hall.enter("greedy 0", tenant="greedy", cost=5)
        hall.enter("modest 1", tenant="modest")
        hall.pass_time(0.0, room=1)
        assert hall.sent[-1].split()[0] == expected


def test_a_long_prompt_that_finds_no_room_does_not_hold_up_another_tenants_short_ones() -> None:
    hall = Hall(saved_tokens=0)
    hall.enter("long", tenant="slow", cost=400, compute_s=1.0)
    hall.enter("short", tenant="quick", cost=100, compute_s=0.01)
    hall.enter("as long", tenant="third", cost=400, compute_s=1.0)
    hall.has_room_for = lambda need: need.compute_s == 0.01
    hall.pass_time(0.0)
    assert hall.sent == ["short"]
    hall.has_room_for, hall.room = lambda need: False, 1
    hall.pass_time(0.0)
    assert hall.sent == ["short", "long"]


def test_who_waits_longer_does_not_pass_on_credit_whose_turn_it_is() -> None:
    """Prompts of one length: the other tenant's are due before, and measured a little shorter."""
    hall = Hall()
    for number in range(5):
        hall.enter(f"greedy {number}", tenant="greedy", compute_s=0.045)
    hall.pass_time(0.2, room=1)
    hall.enter("modest", tenant="modest", compute_s=0.05)
    hall.pass_time(0.0, room=1)
    hall.has_room_for = lambda need: need.compute_s != 0.05
    for _ in range(3):
        hall.pass_time(0.0)
    hall.has_room_for, hall.room = lambda need: False, 1
    hall.pass_time(0.0)
    assert hall.sent.index("modest") <= 3


def test_a_full_queue_is_paid_for_by_who_fills_it() -> None:
    hall = Hall(max_waiting=2)
    hall.enter("g1", tenant="greedy")
    hall.enter("g2", tenant="greedy")
    hall.enter("m", tenant="modest", cost=50)
    assert isinstance(hall.errors["g2"], CapacityError)
    assert hall.errors["g2"].retry_after_s is not None
    with pytest.raises(CapacityError, match="too many requests wait"):
        hall.enter("g3", tenant="greedy")
    assert hall.admission.waiting == 2
    assert hall.counts.reasons == ["full", "full"]


def test_who_waited_too_long_for_its_class_is_sent_away_and_was_not_computed() -> None:
    hall = Hall()
    hall.enter("x", ttft_s=1.0, compute_s=0.4)
    hall.pass_time(MARGIN - 0.4 - 0.01)
    assert not hall.errors
    hall.pass_time(0.02, room=1)
    assert isinstance(hall.errors["x"], CapacityError)
    assert (hall.sent, hall.counts.reasons, hall.admission.waiting) == ([], ["late"], 0)


def test_a_prompt_that_is_too_long_for_its_class_by_itself_is_not_sent_away() -> None:
    hall = Hall()
    hall.enter("x", ttft_s=1.0, compute_s=5.0)
    hall.pass_time(20.0, room=1)
    assert hall.sent == ["x"]
    hall.admission.check_slo(SloTerms(ttft_s=1.0), hall.clock.now_s(), first_token_s=9.0, compute_s=5.0)


def test_a_deadline_that_passes_while_it_waits() -> None:
    hall = Hall()
    hall.enter("x", timeout_s=2.0)
    hall.pass_time(2.0, room=1)
    assert isinstance(hall.errors["x"], DeadlineError)
    assert hall.counts.reasons == ["deadline"]


def test_who_would_wait_too_long_is_told_at_once_and_when_to_come_back() -> None:
    """1,000 tokens a second leave the queue, 10,000 wait in it, and a worker has 0.1 s: a client that can wait for 4 s
    comes back 6.1 s later."""
    hall = Hall()
    for number in range(200):
        hall.enter(str(number))
    for _ in range(100):
        hall.pass_time(0.1, room=1)
    assert hall.admission.waiting == 100
    with pytest.raises(CapacityError) as caught:
        hall.enter("x", ttft_s=4.0 / MARGIN, compute_s=0.0, priority=100)
    assert caught.value.retry_after_s == pytest.approx(6.1, rel=0.03)
    assert hall.enter("y", ttft_s=12.0 / MARGIN, compute_s=0.0, priority=100) is not None
    assert hall.enter("z", tenant="other", ttft_s=4.0 / MARGIN, compute_s=0.0) is not None  # fair share comes sooner


def test_the_plan_is_held_against_the_promise() -> None:
    hall = Hall()
    terms = SloTerms(slo="chat", ttft_s=1.0)
    hall.admission.check_slo(terms, hall.clock.now_s() - 0.3, first_token_s=0.5, compute_s=0.1)
    with pytest.raises(CapacityError, match="SLO class chat") as caught:
        hall.admission.check_slo(terms, hall.clock.now_s() - 0.6, first_token_s=0.5, compute_s=0.1)
    assert caught.value.retry_after_s == pytest.approx(0.2)


def test_who_leaves_leaves_nothing() -> None:
    hall = Hall()
    place = hall.enter("x")
    assert place is not None
    hall.admission.leave(place)
    hall.admission.leave(place)
    hall.pass_time(1.0, room=1)
    assert (hall.admission.waiting, hall.sent, hall.errors) == (0, [], {})


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "time"]), st.integers(0, 3), st.integers(1, 2000), st.floats(0.05, 3.0),
        st.booleans(),
    ),
    max_size=80,
)  # fmt: skip


@settings(deadline=None)
@given(STEPS)
def test_everybody_ends_once_and_the_queue_is_bounded(steps: list[tuple[str, int, int, float, bool]]) -> None:
    """Sent, refused or left: each request exactly one of these, and none before or after it."""
    hall = Hall(max_waiting=5)
    places: dict[str, QueuedRequest] = {}
    ends: dict[str, str] = {}
    delays_s: list[float] = []
    for number, (what, tenant, cost, seconds, is_classed) in enumerate(steps):
        name = f"{tenant}-{number}"
        if what == "time":
            hall.pass_time(seconds, room=cost % 3)
        elif what == "leave" and places:
            gone = sorted(places)[cost % len(places)]
            hall.admission.leave(places.pop(gone))
            if gone not in hall.sent and gone not in hall.errors:
                ends[gone] = "left"
        elif what == "enter":
            try:
                place = hall.enter(
                    name, tenant=str(tenant), cost=cost, compute_s=seconds / 10, timeout_s=20.0,
                    ttft_s=seconds if is_classed else math.inf,
                )  # fmt: skip
            except CapacityError as error:
                ends[name] = "told at once"
                delays_s.append(error.retry_after_s or 0.0)
            else:
                if place is not None:
                    places[name] = place
        assert hall.admission.waiting <= 5
    hall.pass_time(30.0)
    assert hall.admission.waiting == 0
    entered = [f"{tenant}-{number}" for number, (what, tenant, *_) in enumerate(steps) if what == "enter"]
    ended = [*hall.sent, *hall.errors, *ends]
    assert sorted(ended) == sorted(entered)
    assert all(0.1 <= delay_s <= 60.0 for delay_s in delays_s)


def test_a_router_that_stops_refuses_all_who_wait() -> None:
    hall = Hall()
    for name, tenant, model in (("x", "a", ""), ("y", "b", ""), ("z", "a", "other")):
        assert hall.enter(name, tenant=tenant, model=model) is not None
    error = UnavailableError("this router stops")
    hall.admission.refuse_all(error)
    assert hall.errors == {"x": error, "y": error, "z": error}
    assert not hall.admission.waiting
    hall.room = 3
    hall.admission.pump()
    assert not hall.sent
