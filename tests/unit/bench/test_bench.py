"""Test the benches: load, capacities, profiles and reports."""

import asyncio
import json
import subprocess
import sys
from collections import Counter

import pytest

from bench import pages
from bench.load import Due, TimedAnswer, body_of, check_served, offer
from bench.policy.capacity import highest_factor
from bench.profile.__main__ import LIMIT, rate_of, shares
from bench.profile.sampling import LIBRARIES, MODEL, own_time, watched
from tandem.controlplane.simulator.summary import quantile

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with as many tokens as are asked for; a request marked as greedy gets a 503."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    if b"X-Greedy" in head:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\nlater")
    else:
        writer.write(HEAD + b'data: {"choices": []}\n\n' * body["max_tokens"])
        writer.write(b': tandem-timing {"cached_tokens": 4}\n\ndata: [DONE]\n\n')
    writer.close()


def test_answers_come_in_the_order_of_the_plan() -> None:
    plan = [
        Due(0.02, body_of([1, 2], 3)),
        Due(0.0, body_of([1], 1), {"X-Greedy": "1"}),
        Due(0.01, body_of([1], 5)),
    ]

    async def run() -> list[TimedAnswer]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await offer(f"http://127.0.0.1:{port}", plan, 60.0)

    first, greedy, last = asyncio.run(run())
    assert (len(first.token_s), first.timing, first.error) == (3, {"cached_tokens": 4}, "")
    assert len(last.token_s) == 5
    assert first.due_s - greedy.due_s == pytest.approx(0.02)
    assert " 503 " in greedy.error
    check_served([first, last])
    check_served([first, greedy], allowed=" 503 ")
    with pytest.raises(SystemExit, match=r"1 of 3 requests failed, the first with: .* 503 "):
        check_served([first, greedy, last])


@pytest.mark.parametrize("limit", [0.37, 1.0, 3.3, 40.0])
@pytest.mark.parametrize("start", [1.0, 8.0])
def test_the_highest_factor_is_found_from_either_side(limit: float, start: float) -> None:
    asked: list[float] = []

    def share(factor: float) -> float:
        asked.append(factor)
        return 0.0 if factor <= limit else 0.5

    found = highest_factor(share, start=start, precision=0.01)
    assert limit / 1.01 <= found <= limit
    assert len(asked) < 20


def test_what_never_keeps_up_is_an_error() -> None:
    with pytest.raises(ValueError, match="not even"):
        highest_factor(lambda _: 1.0)


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5) == 3.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert quantile([7.0], 0.99) == 7.0


OURS = "StepLoop.turn (/srv/x/workercore/tandem/workercore/step_loop.py:63)"
RAW = f"""<module> (/srv/x/worker/tandem/worker/rank.py:1);{OURS} 7
<module> (/srv/x/worker/tandem/worker/rank.py:1);{OURS};Decoder.forward (/srv/x/engine/tandem/engine/models/decoder.py:102);linear (/usr/lib/torch/nn.py:3) 80
{OURS};sample (/srv/x/engine/tandem/engine/sampler.py:9) 2
{OURS};wait (/usr/lib/python3/threading.py:320) 10
{OURS};get (/srv/x/.venv/lib/site-packages/tandem/else.py:1) 1
"""  # noqa: E501


def test_time_belongs_to_the_innermost_function_but_for_the_models_forward() -> None:
    assert own_time(RAW) == {
        "tandem.workercore.step_loop:StepLoop.turn": 7, MODEL: 80, "tandem.engine.sampler:sample": 2, LIBRARIES: 11,
    }  # fmt: skip


def test_shares_are_of_all_looks_at_all_processes() -> None:
    one, other = own_time(RAW), Counter({LIBRARIES: 100})
    rows = {row.metric: row for row in shares("case", {"rank": one, "router": other})}
    assert rows["busy in rank"].value == rows["busy in router"].value == 50.0
    assert (rows[MODEL].value, rows[LIBRARIES].value) == (40.0, 55.5)
    turn = rows["tandem.workercore.step_loop:StepLoop.turn"]
    assert (turn.value, turn.limit) == (3.5, LIMIT)


def test_tokens_a_second_are_counted_while_all_streams_run() -> None:
    """32 streams with a token every tenth of a second each, twice 6.4 s long."""
    answers = [TimedAnswer(start, [start + step / 10 for step in range(64)]) for start in [0.0] * 32 + [6.4] * 32]
    assert rate_of(answers) == pytest.approx(320.0, rel=0.02)


@pytest.mark.slow
def test_a_process_that_is_gone_is_named_with_the_reason() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(SystemExit, match=r"py-spy cannot look at the router: .+"), watched({"the router": gone.pid}):
        pass


def test_the_text_stays_as_it_was_measured_with() -> None:
    assert pages.digest() == "9d5c5151386fe2de"
    assert len(pages.text().split()) > 8192, "long prompts repeat nothing"
