"""Hand-overs between two real ranks: exact tokens, exact bytes, every ending, and nothing left behind."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import BlockId, GroupId
from tandem.core.metric_names import KV_LINK_BYTES, KV_LINK_SECONDS, KV_LINK_TRANSFERS, counter_key
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Loopback, Rank, prompt_of
from tests.integration.worker.pair import MODEL


@pytest.fixture(params=["shm", "grpc"])
def loopback(folder: Path, request: pytest.FixtureRequest) -> Iterator[Loopback]:
    pair = Loopback(folder, MODEL, transport=request.param, chunk_tokens=64)
    yield pair
    pair.close()


def block_bytes(rank: Rank, blocks: list[BlockId]) -> bytes:
    pool = rank.pools[GroupId(0)]
    spec = pool.spec
    out = bytearray(len(blocks) * spec.block_bytes())
    pool.read_into(blocks, range(len(spec.layers)), range(spec.heads), memoryview(out))
    return bytes(out)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 65, 200])
def test_kv_bytes_and_counts(loopback: Loopback, tokens: int) -> None:
    prompt = prompt_of(tokens)
    loopback.submit("r", prompt, max_tokens=4, ignore_eos=True)
    loopback.run_until_rest()
    assert len(loopback.tokens("r")) == 4
    p, d = loopback.p, loopback.d
    blocks = -(-tokens // 16)
    expected = blocks * p.pools[GroupId(0)].spec.block_bytes()
    assert p.context.counters["kv_sent_bytes"] == d.context.counters["kv_received_bytes"] == expected
    to = {"peer": d.context.worker}
    assert p.context.counters[counter_key(KV_LINK_BYTES, **to)] == expected
    assert p.context.counters[counter_key(KV_LINK_SECONDS, **to)] > 0
    assert p.context.counters[counter_key(KV_LINK_TRANSFERS, outcome="verified", **to)] == 1
    hashes = p.context.engine.ledgers[0].hashes()
    assert len(hashes) == tokens // 16
    for block_hash in hashes:
        at_p = p.context.engine.ledgers[0].lookup(block_hash)
        at_d = d.context.engine.ledgers[0].lookup(block_hash)
        assert at_p is not None
        assert at_d is not None
        assert block_bytes(p, [at_p]) == block_bytes(d, [at_d])
    p.check_baseline()
    d.check_baseline()


def test_blocks_that_the_receiver_has_are_not_sent(loopback: Loopback) -> None:
    prompt = prompt_of(100)
    for name in ("a", "b"):
        loopback.submit(name, prompt, max_tokens=5, ignore_eos=True)
        loopback.run_until_rest()
    assert loopback.tokens("a") == loopback.tokens("b")
    block = loopback.p.pools[GroupId(0)].spec.block_bytes()
    assert loopback.d.context.counters["kv_received_bytes"] == (7 + 1) * block
    assert loopback.d.context.counters["kv_skipped_blocks"] == 6
    assert loopback.chunks["a"][0][0].cached_tokens == 0
    assert loopback.chunks["b"][0][0].cached_tokens == 96


def test_each_worker_says_with_its_first_token_since_when_it_had_the_request(loopback: Loopback) -> None:
    began_s = time.perf_counter()
    loopback.submit("r", prompt_of(200), max_tokens=4, ignore_eos=True)
    loopback.run_until_rest()
    took_s = time.perf_counter() - began_s
    chunks = [chunk for choice in loopback.chunks["r"].values() for chunk in choice]
    (prefill,) = [chunk for chunk in chunks if chunk.HasField("cached_tokens")]
    (decode,) = [chunk for chunk in chunks if chunk.HasField("handoff")]
    assert 0 < decode.phase_s < prefill.phase_s < took_s, "four chunks take longer than a token"
    assert not any(chunk.phase_s for chunk in chunks if chunk not in (prefill, decode))


def test_a_prompt_that_is_all_there_sends_nothing(loopback: Loopback) -> None:
    prompt = prompt_of(64)
    for name in ("a", "b"):
        loopback.submit(name, prompt, max_tokens=5, ignore_eos=True)
        loopback.run_until_rest()
    assert loopback.tokens("a") == loopback.tokens("b")
    assert loopback.d.context.counters["kv_skipped_blocks"] == 4
    assert loopback.d.context.counters["kv_received_blocks"] == 4


def test_three_choices_share_the_prompt(loopback: Loopback) -> None:
    prompt = prompt_of(37)
    loopback.submit("r", prompt, n=3, temperature=1.0, seed=11, max_tokens=6, ignore_eos=True)
    loopback.run_until_rest()
    answers = [loopback.tokens("r", choice) for choice in range(3)]
    assert [len(a) for a in answers] == [6, 6, 6]
    assert len({tuple(a) for a in answers}) > 1
    assert loopback.d.context.counters["kv_received_blocks"] == 3
    loopback.d.check_baseline()


def test_a_replay_goes_on_where_the_answer_stood(loopback: Loopback) -> None:
    """Forced tokens are computed, not sent again; sampling goes on with the same numbers, in every choice."""
    prompt = prompt_of(50)
    settings: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    loopback.submit("a", prompt, **settings)
    loopback.run_until_rest()
    whole = [loopback.tokens("a", choice) for choice in range(2)]
    forced = [g.ChoiceState(choice=choice, tokens=whole[choice][: 5 + choice]) for choice in range(2)]
    loopback.submit("b", prompt, attempt=2, forced=forced, **settings)
    loopback.run_until_rest()
    for choice in range(2):
        assert loopback.chunks["b"][choice][0].index == 5 + choice
        assert loopback.tokens("b", choice) == whole[choice][5 + choice :]
    loopback.p.check_baseline()
    loopback.d.check_baseline()


def test_one_token_needs_no_transfer(loopback: Loopback) -> None:
    loopback.submit("r", prompt_of(40), max_tokens=1)
    loopback.run_until_rest()
    assert len(loopback.tokens("r")) == 1
    assert "kv_received_bytes" not in loopback.d.context.counters
    loopback.p.check_baseline()
    loopback.d.check_baseline()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6, 9])
def test_cancel_at_any_turn_returns_everything(loopback: Loopback, turns: int) -> None:
    loopback.submit("r", prompt_of(300), max_tokens=50, ignore_eos=True)
    for _ in range(turns):
        loopback.turn()
    loopback.cancel("r")
    loopback.run_until_rest()
    loopback.p.check_baseline()
    loopback.d.check_baseline()


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_lost_prefill_worker_fails_the_request(loopback: Loopback, turns: int) -> None:
    loopback.submit("r", prompt_of(300), max_tokens=400, ignore_eos=True)
    for _ in range(turns):
        loopback.turn()
    was_admitted = "requests_admitted" in loopback.d.context.counters
    gone = e.PeerGone(worker="p0", incarnation=loopback.p.incarnation, reason="killed")
    loopback.d.deliver(e.HostToRank(peer_gone=gone))
    loopback.p.from_router(cancel=w.Cancel(request="r", attempt=1, reason="stands for its death"))
    for _ in range(50):
        loopback.turn()
    if was_admitted:
        assert not loopback.failed["r"] or loopback.failed["r"][0].code == "cancelled"
    loopback.cancel("r")
    loopback.run_until_rest()
    loopback.p.check_baseline()
    loopback.d.check_baseline()


def test_receiver_without_room_grants_in_order(folder: Path) -> None:
    with closing(Loopback(folder, MODEL, kv_memory_bytes=21 << 20, max_sequences=4)) as pair:
        for index in range(6):
            pair.submit(f"r{index}", prompt_of(900, seed=index + 3), max_tokens=20, ignore_eos=True)
        pair.run_until_rest()
        assert all(len(pair.tokens(f"r{index}")) == 20 for index in range(6))
        pair.p.check_baseline()
        pair.d.check_baseline()


def test_ticket_for_another_incarnation_is_refused(loopback: Loopback) -> None:
    loopback.d.context.incarnation = loopback.d.context.incarnation + 2  # type: ignore[assignment]
    loopback.submit("r", prompt_of(40))
    for _ in range(200):
        loopback.turn()
    assert {failure.code for failure in loopback.failed["r"]} == {"transfer_failed"}  # each side reports it
    loopback.cancel("r")
    loopback.run_until_rest()
    loopback.p.check_baseline()
    loopback.d.check_baseline()


def test_logs_name_the_request_and_its_trace(loopback: Loopback, caplog: pytest.LogCaptureFixture) -> None:
    loopback.d.context.incarnation = loopback.d.context.incarnation + 2  # type: ignore[assignment]
    loopback.submit("r", prompt_of(40), trace="ab" * 16)
    for _ in range(200):
        loopback.turn()
    said = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "handover failed"]
    assert [(one["request"], one["trace"]) for one in said] == [("r#1", "ab" * 16)]
    loopback.cancel("r")
    loopback.run_until_rest()
