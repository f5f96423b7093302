"""A message that no ring to the host can hold costs the request that it is about, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.rpc.v1 import engine_pb2 as e
from tandem.workercore.message_ring import MessageTooLargeError
from tandem.workercore.outbox import Outbox
from tests.integration.worker.loopback import Loopback, Rank, prompt_of

FEW_BYTES = 1000


def narrow(rank: Rank, is_too_large: Callable[[e.RankToHost, int], bool]) -> None:
    """From now on what `is_too_large` (of a message and its bytes) fits no ring."""

    def send(data: bytes) -> None:
        message = e.RankToHost.FromString(data)
        if is_too_large(message, len(data)):
            raise MessageTooLargeError(f"{len(data)} bytes do not fit a ring of {FEW_BYTES}")
        rank.sent.append(message)

    rank.context.outbox = Outbox(send)


def settle(pair: Loopback, *requests: str) -> None:
    """Both come to rest once the router, which knows of a failure at one end, has cancelled at the other."""
    for _ in range(2000):
        pair.turn()
        for request in requests:
            if pair.failed[request]:
                pair.cancel(request)
        if pair.p.is_at_rest() and pair.d.is_at_rest():
            pair.p.check_baseline()
            pair.d.check_baseline()
            return
    raise AssertionError("the pair does not come to rest")


@pytest.mark.parametrize(("end", "kind"), [("p", "ticket_request"), ("d", "ticket"), ("p", "complete")])
def test_what_cannot_be_said_to_the_peer(sim_loopback: Loopback, end: str, kind: str) -> None:
    rank = sim_loopback.p if end == "p" else sim_loopback.d
    narrow(rank, lambda message, _: message.peer.message.WhichOneof("kind") == kind)
    sim_loopback.submit("r", prompt_of(200, 7), max_tokens=12, ignore_eos=True)
    settle(sim_loopback, "r")
    failures = {failure.code: failure.message for failure in sim_loopback.failed["r"]}
    assert f"a {kind} message about the request is too large" in failures["request_too_large"]
    assert rank.context.counters["messages_too_large"] == 1


def test_a_request_is_failed_alone_though_its_tokens_go_in_one_message_with_others(sim_loopback: Loopback) -> None:
    """Every chunk carries the request's name, and one is very long; the other's tokens, of the same steps, all come."""
    narrow(
        sim_loopback.d,
        lambda message, size: message.router.message.HasField("tokens") and size > FEW_BYTES,
    )
    sim_loopback.submit("plain", prompt_of(100, 3), max_tokens=40, ignore_eos=True)
    sim_loopback.submit("wordy" * 300, prompt_of(100, 5), max_tokens=40, ignore_eos=True)
    settle(sim_loopback, "wordy" * 300, "plain")
    assert sim_loopback.failed["plain"] == []
    assert len(sim_loopback.tokens("plain")) == 40
    assert {failure.code for failure in sim_loopback.failed["wordy" * 300]} >= {"request_too_large"}
    assert sim_loopback.d.context.counters["messages_too_large"] == 1


def test_a_last_token_that_cannot_be_told_is_told_as_a_failure(sim_loopback: Loopback) -> None:
    """The worker has ended the request by then."""
    narrow(sim_loopback.d, lambda message, _: any(chunk.finish for chunk in message.router.message.tokens.chunks))
    sim_loopback.submit("r", prompt_of(100, 3), max_tokens=5, ignore_eos=True)
    settle(sim_loopback)
    assert [failure.code for failure in sim_loopback.failed["r"]] == ["request_too_large"]
    assert len(sim_loopback.tokens("r")) == 4


def test_what_is_about_no_request_is_dropped(sim_loopback: Loopback) -> None:
    narrow(sim_loopback.d, lambda message, _: message.HasField("load"))
    sim_loopback.submit("r", prompt_of(100, 3), max_tokens=5, ignore_eos=True)
    settle(sim_loopback)
    assert len(sim_loopback.tokens("r")) == 5


def test_an_endless_reason_is_cut(sim_loopback: Loopback) -> None:
    """So that a failure is always reported."""
    sim_loopback.submit("r", prompt_of(100, 3), max_tokens=500, ignore_eos=True)
    for _ in range(10):
        sim_loopback.turn()
    (tracked,) = sim_loopback.d.context.requests.all()
    sim_loopback.d.loop._cancel(tracked, "why " * 1_000_000)
    settle(sim_loopback, "r")
    assert all(len(failure.message) <= 10_000 for failure in sim_loopback.failed["r"])
    assert sim_loopback.failed["r"]
