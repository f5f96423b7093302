"""Test requests that can never run, messages too large, and too little memory."""

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.core.config import SimSection
from tandem.core.cpu_level import cpu_level, product_words
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.message_ring import MessageTooLargeError
from tandem.workercore.outbox import Outbox
from tests.integration.worker.alone import worker_of
from tests.integration.worker.loopback import Loopback, Rank, prompt_of
from tests.integration.worker.pair import RunningWorker, pair, submit
from tools.waiting import wait_for_async

PROMPT = [(7 * i) % 4000 + 10 for i in range(40)]
SLOW = SimSection(decode_step_s=0.02)
"""The answer that runs meanwhile takes ten seconds."""


async def refused(worker: RunningWorker, request: str, leg: Any, **sampling: Any) -> tuple[str, str]:
    """Code and reason, which come before the running answer's end."""
    await worker.send(submit=submit(request, leg, worker, PROMPT, ignore_eos=True, **sampling))
    async with asyncio.timeout(60):
        while True:
            message = await worker.messages.get()
            assert not any(chunk.finish for chunk in message.tokens.chunks), "it waited for the other one's end"
            if message.failed.request == request:
                return message.failed.code, message.failed.message


@pytest.mark.parametrize("leg", [w.LEG_FULL, w.LEG_DECODE], ids=["whole", "decode"])
async def test_a_request_that_can_never_fit_is_refused_at_once(folder: Path, leg: Any) -> None:
    async with pair(folder, engine="sim", sim=SLOW, kv_memory_bytes=16 << 20, max_model_len=2048) as (_, d0):
        await d0.send(submit=submit("long", w.LEG_FULL, d0, PROMPT, max_tokens=500, ignore_eos=True))
        async with asyncio.timeout(60):
            while not (await d0.messages.get()).tokens.chunks:
                pass
        blocks, context = [
            await refused(d0, "blocks", leg, max_tokens=1900, n=16),
            await refused(d0, "context", leg, max_tokens=2009),
        ]
    assert blocks[0] == context[0] == "context_length_exceeded"
    assert "needs up to 1922 KV blocks" in blocks[1]
    assert "this worker has 204" in blocks[1]
    assert "lower max_tokens or n" in blocks[1]
    assert "the context length here is 2048" in context[1]


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


async def test_a_worker_says_what_its_memory_is_for(folder: Path) -> None:
    async with worker_of(folder, 1, kv_memory_bytes=64 << 20) as worker:
        worker.process.send_signal(signal.SIGTERM)
        progress = worker.progress
    (line,) = [line for line in (folder / "m0.log").read_text().splitlines() if " memory planned " in line]
    said = {name: int(size) for name, size in re.findall(r"(\w+)_bytes=(\d+)", line)}
    assert list(said) == ["weights", "kv", "activations", "sampler", "graphs", "total"]
    assert sum(said.values()) == 2 * said["total"]
    assert (64 << 20) - (1 << 20) < said["kv"] <= 64 << 20
    assert any(words.startswith("memory of a rank: ") and "64MiB" in words for words in progress)
    assert f"computes in float32; matrix products: {product_words(cpu_level(), 'float32')}" in progress


@pytest.mark.parametrize("tp", [1, 2])
async def test_every_rank_takes_its_memory_once_it_is_ready(folder: Path, tp: int) -> None:
    """No request comes, and none later can find that the memory is gone."""

    def taken() -> list[int]:
        log = (folder / "m0.log").read_text()
        return [int(size) for size in re.findall(r"KV memory is allocated bytes=(\d+)", log)]

    async with worker_of(folder, tp, kv_memory_bytes=32 << 20) as worker:
        await wait_for_async(lambda: len(taken()) == tp)
        worker.process.send_signal(signal.SIGTERM)
    assert all((31 << 20) < size <= 32 << 20 for size in taken())


@pytest.mark.parametrize("tp", [1, 2])
def test_too_little_memory_is_refused_before_any_is_taken(folder: Path, tp: int) -> None:
    async def run() -> None:
        async with worker_of(folder, tp, kv_memory_bytes=1 << 50):
            pass

    with pytest.raises(RuntimeError, match=r"of memory and \d+\w+ are free.*[Gg]ive --kv-memory \d+MiB or less"):
        asyncio.run(run())
