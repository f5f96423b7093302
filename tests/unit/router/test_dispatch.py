"""Whose failure ends a request, and whose no longer does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import TransferError
from tandem.core.ids import RequestId, WorkerId
from tandem.core.lifecycle import Phase
from tandem.core.sampling import SamplingParams
from tandem.router.dispatch import Dispatcher
from tandem.router.outstanding import Outstanding
from tandem.router.plan import Plan
from tandem.router.prefix import PrefixFinder
from tandem.router.requests import Flight, Inbox, Work
from tandem.router.wire import TokenChunk

ERROR = TransferError("the channel to the decode worker was lost")


def link(worker: str) -> Any:
    return SimpleNamespace(worker=worker, requests={"r"}, outstanding=Outstanding())


def first(choice: int) -> TokenChunk:
    return TokenChunk(request="r", attempt=1, choice=choice, index=0, tokens=[7])


class Handover:
    """A request of two choices between two workers, as the router sees it."""

    def __init__(self) -> None:
        self.p, self.d = link("p"), link("d")
        nobody: Any = SimpleNamespace(dropped=lambda reason: None)
        self.dispatcher = Dispatcher(nobody, nobody, PrefixFinder(None, b""), ManualClock(), nobody)
        self.inbox = Inbox(1 << 20)
        self.flight = Flight(
            id=RequestId("r"), slot=0, inbox=self.inbox, started_s=0.0,
            work=Work(prompt=[1], sampling=SamplingParams(max_tokens=9, n=2), timeout_s=1.0),
            plan=Plan(decode=WorkerId("d"), prefill=WorkerId("p"), reason=""), legs={"p": self.p, "d": self.d},
        )  # fmt: skip
        self.dispatcher._flights[self.flight.id] = self.flight

    def say(self, first_tokens: int, *, is_admitted: bool) -> None:
        self.dispatcher.on_tokens(self.p, [first(choice) for choice in range(first_tokens)])
        if is_admitted:
            self.dispatcher.on_phase(self.d, "r", 1, Phase.DECODE)

    def end(self, of: Any, *, is_lost: bool) -> None:
        if is_lost:
            self.dispatcher.on_lost(of, "it hung up")
        else:
            self.dispatcher.on_failed(of, "r", 1, ERROR)


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_prefill_worker_may_fail_once_the_decode_worker_goes_on(is_lost: bool) -> None:
    handover = Handover()
    handover.say(2, is_admitted=True)
    handover.end(handover.p, is_lost=is_lost)
    assert (handover.inbox.error, handover.flight.phase) == (None, Phase.DECODE)
    assert set(handover.flight.legs) == {"d"}
    handover.end(handover.d, is_lost=is_lost)
    assert handover.inbox.error is not None


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(("first_tokens", "is_admitted"), [(2, False), (1, True), (0, True)])
def test_before_that_its_failure_is_the_request_s(first_tokens: int, is_admitted: bool, is_lost: bool) -> None:
    handover = Handover()
    handover.say(first_tokens, is_admitted=is_admitted)
    handover.end(handover.p, is_lost=is_lost)
    assert handover.inbox.error is not None
    assert handover.flight.phase is Phase.FAILED
