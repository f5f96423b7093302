"""The step loop of rank 0: results and messages of an earlier incarnation are void, blocks are checked in pauses, a
prompt is hashed once, and a device that is broken for good ends the worker."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tandem.core.block_hash import chain
from tandem.core.errors import WorkerLostError
from tandem.decode_worker.tickets import ANNOUNCEMENT_WAIT_S
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.engine.simulation import prompt_of
from tests.unit.simulation.crowd import Crowd


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd(blocks=16, max_tokens=8)
    yield crowd
    crowd.close()


def said(crowd: Crowd) -> list[w.WorkerMessage]:
    """Return the messages to routers since the last call."""
    told = [message.router.message for message in crowd.worker.said if message.HasField("router")]
    crowd.worker.said.clear()
    return told


def lapse_in_the_next_step(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    compute: Callable[..., object] = crowd.worker.runner.step

    def late(*args: object) -> object:
        sampled = compute(*args)
        crowd.clock.advance(3.0)
        return sampled

    monkeypatch.setattr(crowd.worker.runner, "step", late)


def test_a_lease_of_the_next_incarnation_says_nothing_of_the_last_one(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, now_s = crowd.worker, crowd.clock.now_s
    worker.pulse.grant(now_s() + 2.5, 9)
    wish = crowd.wish("p0", 8)
    crowd.push(wish, 100)
    lapse_in_the_next_step(crowd, monkeypatch)
    crowd.complete(wish)  # is admitted, and the step that follows outlasts the lease
    submit = w.Submit(request="late", attempt=1, leg=w.LEG_FULL, prompt=[1, 2, 3])
    said(crowd)

    worker.pulse.grant(now_s() + 2.5, 10)  # the page is written before the message is in the ring
    worker.turn()
    assert said(crowd) == []
    late = e.HostToRank(router=e.FromRouter(router="router", message=w.RouterMessage(submit=submit)))
    worker.mail.messages += [late, e.HostToRank(incarnation=e.NewIncarnation(incarnation=10))]
    worker.turn()
    worker.turn()
    assert worker.context.incarnation == 10
    assert [(m.WhichOneof("kind"), m.failed.request, m.failed.code) for m in said(crowd)] == [
        ("failed", wish.id, "cancelled")
    ]
    worker.check_baseline()


@pytest.mark.parametrize("role", ["", "prefill"])
def test_a_worker_that_registers_again_forgets_how_fast_it_was(crowd: Crowd, role: str) -> None:
    """It may have stood still in its only measured step: routers would never ask it again. A role changes nothing."""
    worker, pace = crowd.worker, crowd.worker.engine.pace
    pace.observe(prefill_tokens=4096, decode_tokens=0, duration_s=10.0, prefill_attended=4096.0)
    assert pace.prefill_speed.tokens_per_s > 0
    worker.mail.messages.append(e.HostToRank(incarnation=e.NewIncarnation(incarnation=10, role=role)))
    worker.turn()
    assert (pace.prefill_speed.tokens_per_s > 0) == bool(role)


@pytest.mark.parametrize("by", ["its time", "the peer's end"])
def test_a_role_that_it_had_still_lets_go_of_those_that_asked_it_for_a_ticket(crowd: Crowd, by: str) -> None:
    """No router has announced them; otherwise the worker would never be idle again, and no drain would end."""
    worker = crowd.worker
    crowd.wish("p0", 8, is_announced=False)
    worker.mail.messages.append(e.HostToRank(incarnation=e.NewIncarnation(incarnation=10, role="prefill")))
    worker.turn()
    assert not worker.loop.is_idle()
    if by == "its time":
        crowd.clock.advance(ANNOUNCEMENT_WAIT_S + 0.1)
    else:
        worker.mail.messages.append(e.HostToRank(peer_gone=e.PeerGone(worker="p0", incarnation=1, reason="a test")))
    worker.turn()
    assert worker.loop.is_idle()
    worker.check_baseline()


def test_blocks_are_checked_once_a_pause(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every pause that has lasted a second, and never between two requests."""
    worker, checks = crowd.worker, list[float]()
    monkeypatch.setattr(worker.engine.scheduler, "check_integrity", lambda: checks.append(crowd.clock.now_s()))

    def pause(seconds: float) -> int:
        checks.clear()
        for _ in range(round(10 * seconds)):
            crowd.clock.advance(0.1)
            worker.turn()
        return len(checks)

    assert pause(3.0) == 1
    for _ in range(3):  # a request comes and goes
        wish = crowd.wish("p0", 8, is_asked=False)
        crowd.cancel(wish)
        assert pause(0.8) == 0
    assert pause(3.0) == 1


def test_a_step_that_fails_without_any_fault_of_its_requests_ends_the_worker(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = crowd.wish("p0", 8)
    crowd.push(wish, 100)

    def broken(*args: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(crowd.worker.runner, "step", broken)
    with pytest.raises(WorkerLostError, match="illegal memory access"):
        crowd.complete(wish)


def test_a_request_brings_its_hashes_along(crowd: Crowd) -> None:
    crowd.wish("p0", 12)
    (tracked,) = crowd.worker.context.requests.all()
    request, size = tracked.engine_request, crowd.shape.groups[0].block_tokens
    assert request.prompt == tuple(prompt_of(12, seed=0))
    assert list(request.hashes) == chain(request.hash_root, request.prompt, size) != []


def test_hashes_do_not_outlive_their_root(crowd: Crowd) -> None:
    crowd.wish("p0", 12)
    (tracked,) = crowd.worker.context.requests.all()
    request = tracked.engine_request
    assert request.under(request.hash_root) is request
    lossy = crowd.worker.context.hash_root(b"", lossy="int8")
    assert (request.under(lossy).hash_root, request.under(lossy).hashes) == (lossy, ())
