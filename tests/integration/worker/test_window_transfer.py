"""Test transfers of models with one window, and of latents."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.core import metric_names as names
from tandem.core.block_hash import BlockHash, HashRoot, chain
from tandem.core.ids import GroupId
from tests.integration.worker.loopback import Loopback, Rank
from tests.integration.worker.pair import alone, handed_over, pair
from tests.integration.worker.reference import clear_answer
from tests.integration.worker.trio import Trio
from tools.random_model import LATENT_RANK, TURNED, RandomModel, make_random_model
from tools.waiting import wait_for_async

MODEL = RandomModel(family="mistral", seed=3, window=40)
COMPUTED: dict[str, Any] = {"engine": "model", "kv_memory_bytes": 64 << 20}
COUNT = 10
ANSWER: dict[str, Any] = {"max_tokens": COUNT, "ignore_eos": True}
LENGTHS = (1, 24, 41, 64, 130)


def prompt_of(length: int) -> list[int]:
    return [(19 * i + length + 1) % 500 + 2 for i in range(length)]


def chain_at(rank: Rank, tokens: list[int]) -> list[BlockHash]:
    size = rank.context.engine.layout.groups[0].block_tokens
    return chain(HashRoot(fingerprint=rank.context.fingerprint, block_tokens=size).digest(), tokens, size)


def received(pair: Loopback, name: str, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """The answer, and how many blocks came."""
    counters = pair.d.context.counters
    before = counters.get("kv_received_blocks", 0)
    pair.submit(name, prompt, **{**ANSWER, **more})
    pair.run_until_rest()
    assert not pair.failed[name], pair.failed[name]
    pair.p.check_baseline()
    pair.d.check_baseline()
    return pair.tokens(name), int(counters["kv_received_blocks"] - before)


@pytest.mark.parametrize(("prefill", "decode"), [(16, 16), (16, 8), (8, 16), (24, 16)])
def test_only_the_last_window_travels(folder: Path, prefill: int, decode: int) -> None:
    make_random_model(MODEL, folder / "model")
    sides = {"prefill": {"block_tokens": prefill}, "decode": {"block_tokens": decode}}
    with closing(Loopback(folder, folder / "model", transport="shm", chunk_tokens=32, **sides)) as pair:
        spec = pair.d.pools[GroupId(0)].spec
        assert spec.window == MODEL.window
        counters = pair.d.context.counters
        for length in LENGTHS:
            prompt = prompt_of(length)
            expected = clear_answer(folder / "model", prompt, COUNT)
            cold, blocks = received(pair, f"cold{length}", prompt)
            assert cold == expected
            # A hit that ends in front of the last token needs these, at most a block more than the answer does.
            hit = (length - 1) // decode * decode
            assert blocks == spec.blocks_for(length) - max(0, hit - MODEL.window + 1) // decode
            skipped = counters.get("kv_skipped_blocks", 0)
            warm, blocks = received(pair, f"warm{length}", prompt)
            assert warm == expected
            assert blocks == (length % decode != 0), "nothing but the tail, which has no hash"
            assert counters["kv_skipped_blocks"] > skipped or length < decode
            again, blocks = received(pair, f"again{length}", prompt, is_whole=True)
            assert (again, blocks) == (expected, 0)
            assert pair.chunks[f"again{length}"][0][0].cached_tokens == hit
        assert pair.p.context.counters["kv_sent_bytes"] == counters["kv_received_bytes"]
        assert counters["kv_received_bytes"] == counters["kv_received_blocks"] * spec.block_bytes()


def test_a_prompt_of_many_choices_crosses_with_its_window(folder: Path) -> None:
    make_random_model(MODEL, folder / "model")
    with closing(Loopback(folder, folder / "model", transport="shm", chunk_tokens=32)) as pair:
        prompt = prompt_of(100)
        pair.submit("a", prompt, n=3, temperature=1.0, seed=5, **ANSWER)
        pair.run_until_rest()
        pair.submit("own", prompt, is_whole=True, salt=b"another tenant", n=3, temperature=1.0, seed=5, **ANSWER)
        pair.run_until_rest()
        assert not pair.failed["a"]
        assert [pair.tokens("a", c) for c in range(3)] == [pair.tokens("own", c) for c in range(3)]
        assert len({tuple(pair.tokens("a", c)) for c in range(3)}) == 3
        pair.p.check_baseline()
        pair.d.check_baseline()


@pytest.mark.parametrize("to", ["d1", "p0"])
def test_a_context_is_fetched_from_its_window_on(folder: Path, to: str) -> None:
    """A prompt's head is nowhere but at the prefill worker: a decode worker needs none of it, and that one has it."""
    make_random_model(MODEL, folder / "model")
    with closing(Trio(folder, ("p0", "d0", "d1"), model=folder / "model", **COMPUTED)) as trio:
        prompt = prompt_of(100)
        trio.serve("first", prompt, "p0", "d0", max_tokens=40)
        said = [*prompt, *trio.tokens("first")]
        longer = [*said, *prompt_of(20)]
        expected = clear_answer(folder / "model", longer, 4)
        assert trio["d0"].context.engine.ledgers[0].lookup(chain_at(trio["d0"], said)[0]) is None
        computed = trio.count(to, "prefill_tokens")
        trio.serve("second", longer, *((to, "d0") if to == "p0" else (to,)), sources=[("d0", 128)])
        assert trio.tokens("second") == expected
        assert trio.count(to, "prefill_tokens") - computed == len(longer) - 128
        blocks = {"d1": 8 - (128 - 39) // 16, "p0": 8 - 100 // 16}[to]
        assert trio.count(to, names.FETCHED_BYTES) == blocks * trio[to].pools[GroupId(0)].spec.block_bytes()
        trio.check_baseline()


def test_a_holder_sends_nothing_of_what_is_gone(folder: Path) -> None:
    """The requester lost the blocks that it reported: the ticket is refused, and the prompt computed."""
    make_random_model(MODEL, folder / "model")
    with closing(Trio(folder, ("p0", "d0"), model=folder / "model", **COMPUTED)) as trio:
        prompt = prompt_of(100)
        trio.serve("first", prompt, "p0", "d0", max_tokens=40)
        longer = [*prompt, *trio.tokens("first"), *prompt_of(20)]
        trio.submit("second", longer, "p0", "d0", sources=[("d0", 128)])
        trio.run_until(lambda: trio.has_said("p0", "fetch_request"))
        trio["p0"].context.engine.ledgers[0].evict_cached()
        trio.run_until_rest()
        assert trio.tokens("second") == clear_answer(folder / "model", longer, 4)
        assert trio.count("p0", names.FETCHES) == 0 == trio.count("d0", names.SUPPLIES)
        assert trio.count("p0", "prefill_tokens") == len(prompt) + len(longer)
        trio["p0"].context.engine.ledgers[0].evict_cached()
        trio.serve("third", longer, "p0", "d0", sources=[("d0", 128)])
        assert trio.tokens("third") == trio.tokens("second")
        assert trio.count("p0", names.FETCHES) == 0, "the last window is no use to who hands over a whole prompt"
        trio.check_baseline()


async def test_ranks_go_on_from_the_last_window(folder: Path) -> None:
    make_random_model(MODEL, folder / "model")
    prompt = prompt_of(130)
    expected = clear_answer(folder / "model", prompt, COUNT)
    async with pair(folder, model=folder / "model", prefill={}, decode={"tp": 2}) as (p, d):
        assert await handed_over(p, d, "cold", prompt, COUNT) == expected
        blocks = 9 - (128 - 39) // 16
        block_bytes = 16 * MODEL.layers * 2 * MODEL.kv_heads * (MODEL.hidden // MODEL.heads) * 4
        await wait_for_async(lambda: d.load.counters["transfer_bytes"] == blocks * block_bytes)
        assert await alone(d, "alone", prompt, COUNT) == expected


LATENTS = RandomModel(family="deepseek_v3", layers=2, heads=4, seed=3)
LATENT_PROMPT = [(7 * i) % 500 + 2 for i in range(100)]
BLOCK_TOKENS = 16
TOKEN_KV_BYTES = LATENTS.layers * (LATENT_RANK + TURNED) * 4


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (4, 1)])
async def test_latents_cross_between_ranks_that_all_hold_them(folder: Path, p_tp: int, d_tp: int) -> None:
    make_random_model(LATENTS, folder / "model")
    longer = LATENT_PROMPT + LATENT_PROMPT[:30]
    expected = {len(prompt): clear_answer(folder / "model", prompt, COUNT) for prompt in (LATENT_PROMPT, longer)}
    async with pair(folder, model=folder / "model", prefill={"tp": p_tp}, decode={"tp": d_tp}) as (p, d):
        assert await handed_over(p, d, "cold", LATENT_PROMPT, COUNT) == expected[len(LATENT_PROMPT)]
        sent = d_tp * -(-len(LATENT_PROMPT) // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_KV_BYTES
        await wait_for_async(lambda: d.load.counters["transfer_bytes"] == sent)
        assert await handed_over(p, d, "warm", longer, COUNT) == expected[len(longer)]
        assert await alone(d, "alone", longer, COUNT) == expected[len(longer)]
