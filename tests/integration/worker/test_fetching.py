"""Blocks travel from any holder to any requester, in every direction, and every end of it is clean."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.core import metric_names as names
from tandem.core.ids import BlockId, GroupId
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import generation_pb2 as g
from tests.integration.worker.loopback import Rank, prompt_of
from tests.integration.worker.trio import Trio, losing
from tests.unit.engine.arithmetic import cached_blocks


@pytest.fixture(params=["shm", "tcp", "grpc"])
def trio(folder: Path, request: pytest.FixtureRequest) -> Iterator[Trio]:
    made = Trio(folder, ("p0", "p1", "d0", "d1"), transport=request.param)
    yield made
    made.close()


def content(rank: Rank, block: BlockId) -> bytes:
    pool = rank.pools[GroupId(0)]
    out = bytearray(pool.spec.block_bytes())
    pool.read_into([block], range(len(pool.spec.layers)), range(pool.spec.heads), memoryview(out))
    return bytes(out)


def first_turn(trio: Trio, prompt: list[int], count: int = 40) -> list[int]:
    """p0 prefills, d0 decodes; the conversation so far, with all full blocks but the last held by d0."""
    trio.serve("first", prompt, "p0", "d0", max_tokens=count)
    trio.check("first", prompt, count)
    return [*prompt, *trio.tokens("first")]


def test_the_next_turn_is_computed_where_the_answer_is_not(trio: Trio) -> None:
    """P holds turn 1's prompt, D its answer too: P fetches that part, computes the new tokens, and hands over those."""
    said = first_turn(trio, prompt_of(100))
    computed = trio.count("p0", "prefill_tokens")
    received = trio.count("d0", "kv_received_blocks")
    prompt = [*said, *prompt_of(50, seed=11)]
    trio.serve("second", prompt, "p0", "d0", sources=[("d0", 128)])
    trio.check("second", prompt)
    assert trio.count("p0", "prefill_tokens") - computed == len(prompt) - 128
    assert trio.cached["second"] == 128
    assert trio.count("p0", names.FETCHED_TOKENS) == 128 - 96, "what it has is not fetched"
    assert trio.count("p0", names.FETCHES) == trio.count("d0", names.SUPPLIES) == 1
    block = trio["p0"].pools[GroupId(0)].spec.block_bytes()
    assert trio.count("p0", names.FETCHED_BYTES) == 2 * block
    assert trio.count("d0", "kv_received_blocks") - received == 12 - 8, "and what D has is not sent back"


def test_one_decode_worker_to_another(trio: Trio) -> None:
    said = first_turn(trio, prompt_of(100))
    prompt = [*said, *prompt_of(20, seed=3)]
    trio.serve("second", prompt, "d1", sources=[("d0", 128)])
    trio.check("second", prompt)
    assert trio.cached["second"] == 128
    assert trio.count("d1", "prefill_tokens") == len(prompt) - 128
    theirs, ours = trio["d0"].context.engine.ledgers[0], trio["d1"].context.engine.ledgers[0]
    common = set(theirs.hashes()) & set(ours.hashes())
    assert len(common) == 8
    for block_hash in common:
        source, copy = theirs.lookup(block_hash), ours.lookup(block_hash)
        assert source is not None
        assert copy is not None
        assert content(trio["d0"], source) == content(trio["d1"], copy)


def test_a_fetched_block_is_passed_on(trio: Trio) -> None:
    """p0 → d0 by a hand-over, d0 → d1, d1 → p1 by fetches: any holder of a block can push it again."""
    said = first_turn(trio, prompt_of(100))
    for number, (at, source) in enumerate([("d1", "d0"), ("p1", "d1")]):
        trio.serve(f"r{number}", said, at, sources=[(source, 128)])
        trio.check(f"r{number}", said)
        assert trio.count(at, "prefill_tokens") == len(said) - 128


def test_prefill_to_prefill_and_a_hand_over_of_it(trio: Trio) -> None:
    prompt = prompt_of(200)
    trio.serve("a", prompt, "p0", "d0")
    trio.serve("b", prompt, "p1", "d1", sources=[("p0", 192)])
    trio.check("b", prompt)
    assert trio.count("p1", "prefill_tokens") == 8
    assert trio.count("d1", "kv_received_blocks") == 13


def test_a_replay_fetches_the_forced_output_too(trio: Trio) -> None:
    """d0 generated 60 tokens; another attempt on d1 gets prompt and output from their holders."""
    prompt = prompt_of(100)
    said = first_turn(trio, prompt, 60)
    forced = [g.ChoiceState(choice=0, tokens=said[100:150])]
    trio.serve("again", prompt, "d1", sources=[("d0", 144)], attempt=2, forced=forced, max_tokens=60)
    trio.check("again", prompt, 10, outputs=said[100:150])
    assert trio.count("d1", names.FETCHED_TOKENS) == 144
    assert trio.count("d1", "prefill_tokens") == 150 - 144


def test_choices_share_what_was_fetched(trio: Trio) -> None:
    prompt = prompt_of(100)
    first_turn(trio, prompt)
    trio.serve("r", prompt, "d1", sources=[("d0", 96)], n=1, max_tokens=4)
    trio.check("r", prompt)
    assert trio.count("d1", "prefill_tokens") == 4


def test_nobody_is_asked_for_what_is_here(trio: Trio) -> None:
    prompt = prompt_of(100)
    first_turn(trio, prompt)
    trio.serve("r", prompt, "p0", "d0", sources=[("d0", 96), ("p1", 90), ("p0", 10_000)])
    trio.check("r", prompt)
    assert not trio.has_said("p0", "fetch_request")


def test_the_best_source_that_has_it(trio: Trio) -> None:
    """The first one named has nothing by now, the second has less than announced."""
    prompt = prompt_of(200)
    trio.serve("a", prompt[:100], "p0", "d0")
    trio.serve("b", prompt, "p1", "d1", sources=[("d1", 192), ("p0", 176)])
    trio.check("b", prompt)
    assert trio.count("p1", "prefill_tokens") == 200 - 96
    assert trio.count("p1", names.counter_key(names.FETCHES_FAILED, reason="refused")) == 1


@pytest.mark.parametrize(("ours", "theirs"), [(16, 8), (8, 16), (16, 10), (24, 16)])
def test_block_sizes_differ(folder: Path, ours: int, theirs: int) -> None:
    """The requester asks in tokens, the holder hashes in its blocks and cuts for the requester's."""
    own = {"d0": {"block_tokens": theirs}, "d1": {"block_tokens": ours}}
    with closing(Trio(folder, ("d0", "d1"), own=own)) as trio:
        prompt = prompt_of(150)
        trio.submit("warm", prompt[: ours + 3], "d1")
        trio.serve("a", prompt, "d0")
        before = trio.count("d1", "prefill_tokens")
        trio.serve("b", prompt, "d1", sources=[("d0", 150 // theirs * theirs)])
        trio.check("b", prompt)
        usable = min(150 // theirs * theirs, 149) // ours * ours
        assert trio.count("d1", "prefill_tokens") - before == 150 - usable
        assert trio.count("d1", names.FETCHED_TOKENS) == usable - (ours + 3) // ours * ours


LOSSY: dict[str, dict[str, Any]] = {
    "converted": {"d0": {"kv_dtype": "float32"}, "d1": {"kv_dtype": "bfloat16"}, "p0": {"kv_dtype": "bfloat16"}},
    "codec": {"d0": {"wire_codec": "int8", "wire_codec_below_bytes_per_s": 1e18}},
}


@pytest.mark.parametrize("form", LOSSY)
def test_lossy_copies_never_pass_for_exact(folder: Path, form: str) -> None:
    """A whole request takes them under their own root; a prefill worker that hands over does not; and a request with
    the exact root does not find them."""
    with closing(Trio(folder, ("p0", "d0", "d1"), own=LOSSY[form])) as trio:
        prompt = prompt_of(100)
        trio.serve("a", prompt, "d0")
        lossy = "int8" if form == "codec" else "float32>bfloat16"
        trio.serve("b", prompt, "d1", sources=[("d0", 96)])
        assert trio.count("d1", names.FETCHED_TOKENS) == 96
        rank = trio["d1"].context
        exact, changed = (rank.hash_root(b"", lossy=name) for name in ("", lossy))
        assert not cached_blocks(rank.engine, exact, tuple(prompt), GroupId(0))
        assert len(cached_blocks(rank.engine, changed, tuple(prompt), GroupId(0))) == 6
        trio.serve("c", prompt, "d1")
        trio.check("c", prompt)
        assert trio.cached["c"] == 0
        trio.serve("e", prompt, "p0", "d1", sources=[("d0", 96)])
        trio.check("e", prompt)
        if form == "codec":  # it takes exact bytes alone, and gets them
            assert trio.count("p0", names.FETCHED_TOKENS) == 96
            assert trio.cached["e"] == 96
        else:
            assert trio.count("p0", names.FETCHES) == trio.cached["e"] == 0


def test_a_lossy_copy_is_passed_on_under_its_name(folder: Path) -> None:
    own = {"d0": {"wire_codec": "int8", "wire_codec_below_bytes_per_s": 1e18}}
    with closing(Trio(folder, ("p0", "d0", "d1", "d2"), own=own)) as trio:
        prompt = prompt_of(100)
        for request, at, source in (("a", "d0", ""), ("b", "d1", "d0")):
            trio.serve(request, prompt, at, sources=[(source, 96)] if source else ())
        trio.serve("exact", prompt, "d2", sources=[("d1", 96)])
        assert trio.count("d2", names.FETCHES) == 0, "d1 has no exact block"
        trio["d2"].context.engine.ledgers[0].evict_cached()
        trio.serve("no", prompt, "p0", "d2", sources=[("d1", 96)], lossy="int8")
        assert not trio.has_said("p0", "fetch_request")
        trio["d2"].context.engine.ledgers[0].evict_cached()
        trio.serve("c", prompt, "d2", sources=[("d1", 96)], lossy="int8")
        context = trio["d2"].context
        assert trio.count("d2", names.FETCHES) == 1
        assert len(cached_blocks(context.engine, context.hash_root(b"", lossy="int8"), tuple(prompt), GroupId(0))) == 6
        assert not cached_blocks(context.engine, context.hash_root(b""), tuple(prompt), GroupId(0))
        trio.check_baseline()


def test_the_others_are_not_delayed(trio: Trio) -> None:
    """While one request waits for a silent holder, another is served."""
    prompt = prompt_of(100)
    first_turn(trio, prompt)
    trio.fate = losing("fetch_offer")
    trio.submit("waits", prompt, "d1", sources=[("d0", 96)])
    trio.submit("goes", prompt_of(50, seed=3), "d1")
    trio.run_until(lambda: len(trio.got["goes"]) == 4)
    assert not trio.got["waits"]
    trio.fate = losing()
    trio.clock.skip(5)
    trio.run_until_rest()
    trio.check("waits", prompt)
    assert trio.count("d1", names.counter_key(names.FETCHES_FAILED, reason="late")) == 1


def test_the_oracle_notices_a_wrong_block(trio: Trio) -> None:
    """One bit of the holder's block: the requester's answer, which is computed upon the copy, is another one."""
    prompt = prompt_of(100)
    trio.serve("a", prompt, "d0")
    pool, ledger = trio["d0"].pools[GroupId(0)], trio["d0"].context.engine.ledgers[0]
    block = ledger.lookup(ledger.hashes()[2])
    assert block is not None
    everything = ([block], range(len(pool.spec.layers)), range(pool.spec.heads))
    changed = bytearray(content(trio["d0"], block))
    changed[len(changed) // 2] ^= 16
    pool.write_from(*everything, memoryview(changed))
    trio.serve("b", prompt, "d1", sources=[("d0", 96)])
    assert trio.tokens("b") != expected_tokens(prompt, 4, 4096, eos_token_ids=(1,))
