"""A client that leaves in any phase: the router forgets the request at once, both ranks give every block back."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.config import Disaggregation
from tandem.decode_worker.reservation import Reservation
from tandem.decode_worker.role import DecodeRole
from tandem.prefill_worker.handover import Handover, HandoverStage
from tandem.prefill_worker.role import PrefillRole
from tandem.router.tokenization.tokenizer import LONG_TEXT_CHARS, Tokenizer
from tests.integration.router import leaving
from tests.integration.router.house import ADMIN_KEY, RouterHarness, builder
from tests.integration.router.leaving import WAYS
from tests.integration.worker.fetchcase import FrameGate
from tests.integration.worker.pair import shape_in
from tests.integration.worker.still_pair import StillPair
from tools.waiting import wait_for

TOKENS = 600
"""Of the prompt: ten chunks."""
MOST_TURNS = 500
"""Within which everything is free: two milliseconds each where there is nothing to do, and far less than any lease."""


@dataclass(frozen=True)
class Setting:
    house: RouterHarness
    pair: StillPair

    @property
    def handover(self) -> Handover | None:
        """The request's, at the prefill rank."""
        role = self.pair.p.role
        assert isinstance(role, PrefillRole)
        found = [one for one in role._handovers.values() if len(one.tracked.engine_request.prompt) == TOKENS]
        return found[0] if found else None

    @property
    def reservation(self) -> Reservation | None:
        """The request's, at the decode rank."""
        role = self.pair.d.role
        assert isinstance(role, DecodeRole)
        return next(iter(role._reservations.all()), None)

    def is_in(self, stage: HandoverStage) -> bool:
        return self.handover is not None and self.handover.stage is stage

    def counter(self, name: str) -> float:
        return self.house.metric(f"tandem_requests_total{{{name}")

    def holds(self, request: str) -> list[str]:
        """Return the holders of blocks for it, at either rank."""
        ranks = (self.pair.p, self.pair.d)
        ledgers = [ledger for rank in ranks for ledger in rank.context.engine.ledgers]
        return [holder.key for ledger in ledgers for holder in ledger.holders() if holder.key.startswith(request)]

    def is_at_rest(self) -> bool:
        return self.pair.p.is_at_rest() and self.pair.d.is_at_rest()


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    with tempfile.TemporaryDirectory(prefix="td-") as name, builder(Path(name)) as build:
        shape, ranks = shape_in(Path(name) / "tandem-tiny"), Path(name) / "ranks"
        ranks.mkdir()
        house = build(prefill=0, decode=0, start=False, mode=Disaggregation.ALWAYS)
        pair = StillPair(ranks, shape, house.secret, engine="sim", transport="shm", chunk_tokens=64, max_step_tokens=64)
        pair.begin()
        house.workers.update(pair.workers)  # type: ignore[arg-type]
        with pair.running():
            house.start()
            house.wait_ready()
            yield Setting(house, pair)
        house.stop()
        pair.close()


# ---- clients --------------------------------------------------------------------------------------------------------


def ask(house: RouterHarness, way: str, prompt: str | list[int], max_tokens: int = 400) -> Callable[[], None]:
    """Send a request; returns how its client leaves."""
    http, grpc = (f"127.0.0.1:{house.ports[name]}" for name in ("http", "grpc"))
    return leaving.ask(http, grpc, way, prompt, max_tokens=max_tokens)


# ---- phases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """`is_reached` holds after some turn, in which the ranks then stand still. What would lead out of it is held."""

    name: str
    is_reached: Callable[[Setting], bool]
    held: tuple[str, ...] = ()
    has_gate: bool = False
    is_behind_another: bool = False
    legs: tuple[str, ...] = ("p0", "d0")
    """Return the workers that still work for the request, as the router sees it."""


def _is_prefilling(on: Setting) -> bool:
    return on.is_in(HandoverStage.COMPUTING) and on.reservation is None


def _is_reserved(on: Setting) -> bool:
    handover = on.handover
    return on.reservation is not None and handover is not None and handover.ticket is None


def _is_transferring(on: Setting) -> bool:
    landed = [one.bytes for one in on.pair.d.context.receiver.transfers()]
    return on.is_in(HandoverStage.AWAITING) and any(landed) and on.reservation is not None


def _is_between(on: Setting) -> bool:
    held = on.reservation
    return (
        on.is_in(HandoverStage.AWAITING) and held is not None and held.verified is not None and held.completed is None
    )


def _is_decoding(on: Setting) -> bool:
    said = [chunk for chunks in on.pair.chunks.values() for chunk in chunks[0]]
    return on.handover is None and len(said) >= 5


PHASES = (
    Phase("queued", lambda on: on.is_in(HandoverStage.QUEUED), is_behind_another=True),
    Phase("prefilling", _is_prefilling, held=("ticket_request",)),
    Phase("reserved", _is_reserved, held=("ticket",)),
    Phase("transferring", _is_transferring, has_gate=True),
    Phase("between prefill and decode", _is_between, held=("complete",)),
    Phase("decoding", _is_decoding, legs=("d0",)),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_client_that_leaves(setting: Setting, phase: Phase, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    house, pair = setting.house, setting.pair
    pair.stand_still()
    pair.call(pair.chunks.clear)
    heard = len(pair.workers["p0"].submitted)
    if phase.has_gate:
        FrameGate(pair.p, monkeypatch)
    number = 1 + 10 * PHASES.index(phase) + WAYS.index(way)
    with another_first(setting, number) if phase.is_behind_another else nobody():
        leave = ask(house, way, prompt_of(TOKENS, number))
        if phase.is_behind_another:
            wait_for(lambda: all(len(worker.submitted) == heard + 2 for worker in pair.workers.values()))
        pair.run_to(lambda: phase.is_reached(setting), phase.held)
        (request,) = [str(f.id) for f in house.router.dispatcher.flights if len(f.work.prompt) == TOKENS]
        leave()
        # The router's part, for which it needs no worker.
        house.wait(lambda: request not in [flight.id for flight in house.router.dispatcher.flights])
        for link in house.router.table.links:
            assert request not in link.requests
        house.wait(lambda: all(request in pair.workers[leg].cancelled for leg in phase.legs))
        # The workers' part.
        said = sum(map(len, pair.chunks[request].values()))
        pair.go_on()
        pair.wait(lambda: not setting.holds(request) and setting.handover is None)
        turns = pair.call(lambda: pair.turns)
        assert turns <= MOST_TURNS
    pair.wait(setting.is_at_rest)
    assert sum(map(len, pair.chunks[request].values())) == said, "it went on computing"
    for rank in (pair.p, pair.d):
        pair.call(rank.check_baseline)
    assert not house.router.dispatcher.flights
    check_books(house)


def check_books(house: RouterHarness) -> None:
    """Check the books as operators see them: nothing in flight, nothing held."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    audit: dict[str, Any] = httpx.get(f"{house.admin_url}/admin/v1/kv/audit", headers=headers).json()
    assert audit["holds"] == []
    assert [worker["requests"] for worker in audit["workers"]] == [0, 0]
    assert house.status()["router"]["in_flight"] == 0


def prompt_of(tokens: int, number: int) -> list[int]:
    """Unlike those of other numbers from the first block on."""
    return [300 + (number * 131 + 7 * place * place) % 3000 for place in range(tokens)]


@contextmanager
def another_first(setting: Setting, number: int) -> Iterator[None]:
    """A shorter prompt that is computed before, and answered in the end."""
    answers: list[int] = []

    def complete() -> None:
        body = {"model": "tiny", "prompt": prompt_of(400, 1000 + number), "max_tokens": 2, "ignore_eos": True}
        answers.append(httpx.post(f"{setting.house.url}/v1/completions", json=body, timeout=60).status_code)

    thread = threading.Thread(target=complete)
    thread.start()
    setting.house.wait(lambda: bool(setting.house.router.dispatcher.flights))  # so that it is sent first
    yield
    thread.join(60)
    assert answers == [200]


@contextmanager
def nobody() -> Iterator[None]:
    yield


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_while_its_prompt_is_tokenised(
    setting: Setting, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noticed while the tokenizer is at work, and no worker ever receives the request.

    Another one, which waits for the tokenizer, is not even tokenised.
    """
    house, pair = setting.house, setting.pair
    begun: list[str] = []
    encode, has_begun, may_end, has_ended = Tokenizer._encode, *(threading.Event() for _ in range(3))

    def gated(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        begun.append(text[:6])
        has_begun.set()
        assert may_end.wait(60)
        try:
            return encode(tokenizer, text, add_special_tokens)
        finally:
            has_ended.set()

    monkeypatch.setattr(Tokenizer, "_encode", gated)
    outcome = f'api="{"grpc" if way == "grpc" else "completions"}",outcome="cancelled"'
    cancelled = setting.counter(outcome)
    received = [dict(rank.context.counters).get("requests_received") for rank in (pair.p, pair.d)]
    leave = ask(house, way, "first " * LONG_TEXT_CHARS, max_tokens=4)
    try:
        assert has_begun.wait(60)
        leave_too = ask(house, way, "second " * LONG_TEXT_CHARS, max_tokens=4)
        wait_for(lambda: tokenizer_queue(house) == 1)
        leave_too()
        wait_for(lambda: setting.counter(outcome) == cancelled + 1)
        leave()
        wait_for(lambda: setting.counter(outcome) == cancelled + 2)
    finally:
        may_end.set()
    assert has_ended.wait(60)
    assert ask_whole(house) == 200  # what came of the text would have been sent before this
    after = [dict(rank.context.counters).get("requests_received") for rank in (pair.p, pair.d)]
    assert after == [(count or 0) + 1 for count in received]
    house.wait(lambda: not house.router.dispatcher.flights)
    assert set(begun) == {"first "}  # a text of this length is counted in pieces first


def tokenizer_queue(house: RouterHarness) -> int:
    """Texts that wait for the tokenizer's thread."""
    return house.router.frontend.models.find("tiny").tokenizer._thread._work_queue.qsize()


def ask_whole(house: RouterHarness) -> int:
    body = {"model": "tiny", "prompt": [300, 301], "max_tokens": 2, "ignore_eos": True}
    return httpx.post(f"{house.url}/v1/completions", json=body, timeout=60).status_code
