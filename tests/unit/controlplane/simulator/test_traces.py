"""Traces: both formats, scaling, ids that become block hashes; made-up ones with the statistics that they claim."""

import statistics
from pathlib import Path

import pytest

from tandem.controlplane.simulator import traces
from tandem.controlplane.simulator.traces import BlockNames, RequestLog, TraceRequest
from tandem.controlplane.simulator.workloads import ConversationWorkload, conversations, shared_prompt
from tandem.core.errors import ConfigError


def test_mooncakes_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"timestamp": 4000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 5, 6]}\n'
        '{"timestamp": 1000, "input_length": 500, "output_length": 0, "hash_ids": [0]}\n'
    )
    first, second = traces.read(path).requests
    assert first == TraceRequest(arrival_s=0.0, prompt_tokens=500, output_tokens=1, blocks=(0,))
    assert second == TraceRequest(arrival_s=3.0, prompt_tokens=1100, output_tokens=7, blocks=(0, 5, 6))


def test_azures_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.2299600,110,27\n"
    )
    first, second = traces.read(path).requests
    assert (first.prompt_tokens, first.output_tokens, first.blocks) == (4808, 10, ())
    assert second.arrival_s == pytest.approx(1.25)


@pytest.mark.parametrize(("name", "text"), [("a.txt", ""), ("a.csv", "x,y\n1,2\n"), ("a.jsonl", "no"), ("b.jsonl", "")])
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError):
        traces.read(path)


def test_scaling_moves_arrivals_alone() -> None:
    trace = conversations(ConversationWorkload(requests=50), seed=3)
    fast = trace.scaled(4.0)
    assert fast.span_s == pytest.approx(trace.span_s / 4)
    assert [r.prompt_tokens for r in fast.requests] == [r.prompt_tokens for r in trace.requests]
    assert len(trace.first(trace.span_s / 2).requests) < 50


def test_equal_ids_are_equal_blocks_and_only_they() -> None:
    names = BlockNames(512, 128)
    one = names.hashes(TraceRequest(arrival_s=0, prompt_tokens=1100, output_tokens=1, blocks=(7, 8, 9)), 1)
    two = names.hashes(TraceRequest(arrival_s=0, prompt_tokens=900, output_tokens=1, blocks=(7, 4)), 2)
    assert (len(one), len(two)) == (8, 7)
    assert one[:4] == two[:4]
    assert not set(one[4:]) & set(two[4:])
    alone = [names.hashes(TraceRequest(arrival_s=0, prompt_tokens=300, output_tokens=1), n) for n in (1, 2)]
    assert len({*alone[0], *alone[1], *one, *two}) == 2 + 2 + 8 + 3
    assert (
        len({name[0] for name in names.hashes(TraceRequest(arrival_s=0, prompt_tokens=51200, output_tokens=1), 3)})
        > 100
    )


def test_blocks_that_do_not_fit_the_traces_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        BlockNames(512, 48)


def test_the_ideal_hit_rate_counts_full_blocks_seen_before() -> None:
    requests = (
        TraceRequest(arrival_s=0, prompt_tokens=1024, output_tokens=1, blocks=(0, 1)),
        TraceRequest(arrival_s=1, prompt_tokens=1536, output_tokens=1, blocks=(0, 1, 2)),
        TraceRequest(arrival_s=2, prompt_tokens=1024, output_tokens=1, blocks=(0, 1)),
    )
    # The last token of a prompt is always computed: of the third, one block alone.
    assert RequestLog(name="t", requests=requests).ideal_hit_rate() == pytest.approx((1024 + 512) / 3584)


def test_made_up_conversations_look_like_mooncakes() -> None:
    trace = conversations(ConversationWorkload(requests=4000), seed=1)
    prompts = [r.prompt_tokens for r in trace.requests]
    assert trace == conversations(ConversationWorkload(requests=4000), seed=1)
    assert trace != conversations(ConversationWorkload(requests=4000), seed=2)
    assert 9_000 < statistics.mean(prompts) < 15_000
    assert 5_000 < statistics.median(prompts) < 9_000
    assert 0.25 < trace.ideal_hit_rate() < 0.5
    assert 250 < statistics.mean(r.output_tokens for r in trace.requests) < 400


def test_a_shared_prompt_is_shared() -> None:
    trace = shared_prompt(requests=200, rate=5.0, shared_tokens=4096, own_tokens=512, output_tokens=50, seed=1)
    assert {r.blocks[:8] for r in trace.requests} == {tuple(range(1, 9))}
    assert len({r.blocks[8] for r in trace.requests}) == 200
    assert trace.rate == pytest.approx(5.0, rel=0.2)
