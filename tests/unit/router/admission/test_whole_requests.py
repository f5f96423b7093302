"""Requests sent to one worker past those that wait for a pair: the real room, the real dispatcher, the real queue."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tandem.core.config import AdmissionSection, Disaggregation
from tandem.core.ids import RequestId, WorkerId
from tandem.core.sampling import SamplingParams
from tandem.router.admission.admission_controller import AdmissionController, AdmissionRequest
from tandem.router.admission.capacity import CapacityCheck, ResourceDemand
from tandem.router.admission.slo import SloTerms
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest
from tandem.router.metrics.router import Metrics
from tests.unit.router.stage import Stage, in_loop

PROMPT_TOKENS = 1000
LIMIT = AdmissionSection().worker_queue_requests
AUTO, NEVER = Disaggregation.AUTO, Disaggregation.NEVER


class Crowd:
    """Requests that all come at once to workers that never reported."""

    def __init__(self, stack: ExitStack, mode: Disaggregation, *workers: str) -> None:
        self.stage, self._stack = Stage(*workers, disaggregation=mode), stack
        room, rules = CapacityCheck(AdmissionSection()), AdmissionSection()
        table, clock = self.stage.table, self.stage.clock

        def has_place(worker: WorkerId, need: ResourceDemand) -> bool:
            return room.is_there_whole(need, self.stage.link(worker), clock.now_s())

        self.admission = AdmissionController(
            rules,
            clock,
            lambda model, need: room.is_there(need, table.usable(model), clock.now_s()),
            Metrics(list, lambda: 0),
            has_place=has_place,
        )
        self.stage.dispatcher._queue = self.admission
        self.work = GenerationRequest(
            prompt=[1] * PROMPT_TOKENS, sampling=SamplingParams(max_tokens=200), timeout_s=60.0
        )

    def come(self, count: int) -> None:
        for number in range(count):
            self._enter(RequestId(str(number)))
        self.admission.pump()

    def _enter(self, request: RequestId) -> None:
        now_s, dispatcher, inbox = self.stage.clock.now_s(), self.stage.dispatcher, ArrivalQueue(1 << 20)
        arrived = AdmissionRequest(
            terms=SloTerms(),
            need=ResourceDemand(prompt_tokens=PROMPT_TOKENS, choices=1),
            cost=PROMPT_TOKENS,
            arrived_s=now_s,
            deadline_s=now_s + 60.0,
        )

        def send() -> None:
            self._stack.enter_context(dispatcher.submit(request, 0, self.work, inbox))

        self.admission.enter(
            arrived,
            lambda: 0.2,
            send,
            inbox.fail,
            lambda waiting: dispatcher.alone(self.work, waiting),
        )

    def sent_to(self, worker: str) -> int:
        return len(self.stage.link(worker).outstanding)


@pytest.mark.parametrize(
    ("mode", "workers"), [(AUTO, ["d1"]), (NEVER, ["d1"]), (AUTO, ["d1", "d2"]), (NEVER, ["m1"])], ids=str
)
@in_loop
async def test_where_one_kind_of_worker_serves_its_queue_is_as_short_as_was_set(
    mode: Disaggregation, workers: list[str]
) -> None:
    with ExitStack() as stack:
        crowd = Crowd(stack, mode, *workers)
        crowd.come(300)
        assert [crowd.sent_to(worker) for worker in workers] == [LIMIT] * len(workers)
        assert crowd.admission.waiting == 300 - LIMIT * len(workers)


@pytest.mark.parametrize("other", ["p1", "m1"])
@in_loop
async def test_a_decode_worker_takes_whole_requests_while_that_is_better_than_the_others(other: str) -> None:
    with ExitStack() as stack:
        crowd = Crowd(stack, AUTO, other, "d1")
        crowd.come(300)
        assert crowd.sent_to(other) == LIMIT
        assert LIMIT < crowd.sent_to("d1") < 300 - LIMIT, "as many as cost less there, and no more"
        assert crowd.admission.waiting == 300 - len(crowd.stage.dispatcher.flights)


@in_loop
async def test_a_decode_worker_is_nobodys_better_choice_with_never() -> None:
    with ExitStack() as stack:
        for mode, worker in ((AUTO, "d1"), (NEVER, None)):
            crowd = Crowd(stack, mode, "p1", "d1")
            crowd.come(9)
            assert crowd.stage.dispatcher.alone(crowd.work, 99) == worker
