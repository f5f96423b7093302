"""Rank 0 and a lease that its host got under a new incarnation: results and messages of the one before are void."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.decode_worker.tickets import ANNOUNCEMENT_WAIT_S
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.simulation.crowd import Crowd


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


def test_a_lease_of_the_next_incarnation_says_nothing_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(blocks=16, max_tokens=8)
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
    crowd.close()


@pytest.mark.parametrize("by", ["its time", "the peer's end"])
def test_a_role_that_it_had_still_lets_go_of_those_that_asked_it_for_a_ticket(by: str) -> None:
    """No router has announced them; otherwise the worker would never be idle again, and no drain would end."""
    crowd = Crowd(blocks=16)
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
    crowd.close()
