"""Fetches between real worker processes: the models' answers, ranks of any number, and a holder that is killed."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.core import metric_names as names
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.pair import RunningWorker, pair, shape_in, submit, tokens_of
from tests.integration.worker.reference import reference
from tools.waiting import wait_for_async, words_of

PROMPT = [(7 * i) % 4000 + 10 for i in range(100)]
NEW = [(11 * i) % 4000 + 10 for i in range(30)]
BOUND_S = 60


async def turn(p: RunningWorker, d: RunningWorker, request: str, prompt: list[int], count: int, held: int) -> list[int]:
    """Prefill at `p`, with `d` named as holder of `held` tokens of it, and decode at `d`."""
    whole: dict[str, Any] = {"max_tokens": count, "ignore_eos": True}
    await d.send(submit=submit(request, w.LEG_DECODE, p, prompt, **whole))
    message = submit(request, w.LEG_PREFILL, d, prompt, **whole)
    if held:
        message.sources.append(w.PrefixSource(worker=d.ref, tokens=held))
    await p.send(submit=message)
    return await tokens_of(p, request, 1) + await tokens_of(d, request, count - 1, start=1)


async def told(worker: RunningWorker, is_so: Callable[[w.LoadReport], bool]) -> dict[str, float]:
    """Return the worker's counters once its load report meets the condition."""
    await wait_for_async(lambda: is_so(worker.load), BOUND_S, f"the load of {worker.name}: {words_of(is_so)}")
    return dict(worker.load.counters)


def at_rest(load: w.LoadReport) -> bool:
    return not load.in_flight and not any(b.request + b.pushing + b.reserved for b in load.blocks)


async def two_turns(folder: Path, **settings: Any) -> tuple[list[int], list[int], dict[str, float]]:
    """Return both answers of a conversation with the first answer in its second prompt, and the counters then."""
    async with pair(folder, **settings) as (p, d):
        first = await turn(p, d, "r1", PROMPT, 60, 0)
        await told(d, at_rest)
        second = await turn(p, d, "r2", [*PROMPT, *first, *NEW], 10, 144)
        counters = await told(p, lambda load: load.counters.get(names.FETCHES, 0) == 1 and at_rest(load))
        await told(d, at_rest)
        return first, second, counters


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_conversation_of_the_model(folder: Path, transport: str) -> None:
    """Both answers are those of one machine, and the second prompt is computed from where the fetched blocks end."""

    first, second, counters = asyncio.run(two_turns(folder, transport=transport))
    assert first == reference(PROMPT, 60)
    assert second == reference([*PROMPT, *first, *NEW], 10)
    assert counters[names.FETCHED_TOKENS] == 144 - 96
    assert counters["prefill_tokens"] == 100 + 190 - 144


@pytest.mark.parametrize(("tp", "theirs"), [(1, 2), (2, 1), (4, 2)])
def test_any_number_of_ranks(folder: Path, tmp_path: Path, tp: int, theirs: int) -> None:
    """Every rank of the holder pushes its heads to every rank of the requester that has them."""
    shape = shape_in(tmp_path / "tandem-tiny", num_key_value_heads=2)
    talk = two_turns(folder, model=shape, engine="sim", prefill={"tp": tp}, decode={"tp": theirs})
    first, second, counters = asyncio.run(talk)
    assert first == expected_tokens(PROMPT, 60, 4096, eos_token_ids=(1,))
    assert second == expected_tokens([*PROMPT, *first, *NEW], 10, 4096, eos_token_ids=(1,))
    assert counters["prefill_tokens"] == 100 + 190 - 144


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_holder_that_is_killed_or_stopped(folder: Path, number: signal.Signals) -> None:
    """The request computes what it cannot fetch, and the requester holds nothing for a worker that is gone."""
    async with pair(folder, engine="sim") as (p, d):
        await d.send(submit=submit("r1", w.LEG_FULL, p, PROMPT, max_tokens=60, ignore_eos=True))
        answer = await tokens_of(d, "r1", 60)
        prompt = [*PROMPT, *answer, *NEW]
        for pid in (d.process.pid, d.rank_pid):
            os.kill(pid, number)
        message = submit("r2", w.LEG_FULL, d, prompt, max_tokens=5, ignore_eos=True)
        message.sources.append(w.PrefixSource(worker=d.ref, tokens=144))
        await p.send(submit=message)
        tokens = await tokens_of(p, "r2", 5)
        counters = await told(p, lambda load: load.counters.get("requests_finished", 0) == 1 and at_rest(load))
        if number == signal.SIGSTOP:
            for pid in (d.process.pid, d.rank_pid):
                os.kill(pid, signal.SIGCONT)
        assert tokens == expected_tokens(prompt, 5, 4096, eos_token_ids=(1,))
        _, counters = tokens, counters
    assert counters["prefill_tokens"] == 190
    reason = "peer_gone" if number == signal.SIGKILL else "late"
    assert counters[names.counter_key(names.FETCHES_FAILED, reason=reason)] == 1
