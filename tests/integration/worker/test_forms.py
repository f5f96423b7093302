"""Hand-overs between workers with different KV: exact where only blocks are cut anew, under a root of their own where
bytes change, refused with a reason where nothing fits."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.block_hash import HashRoot, chain
from tandem.core.ids import BlockId, GroupId
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S, PROTOCOL
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Loopback, Rank, forward, prompt_of
from tests.integration.worker.pair import MODEL

LENGTHS = (1, 8, 17, 24, 25, 65, 200)
SIZES = [(16, 8), (8, 16), (16, 24), (24, 16)]
ANSWER: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 5}
FORCED: dict[str, Any] = {"wire_codec_below_bytes_per_s": ALWAYS_BYTES_PER_S}
# what the two ends are set to, HashRoot.lossy of what arrives, and how far a logprob may be off
LOSSY: dict[str, tuple[dict[str, Any], dict[str, Any], str, float]] = {
    "f32 to bf16": ({"kv_dtype": "float32"}, {"kv_dtype": "bfloat16"}, "float32>bfloat16", 0.05),
    "bf16 to f32": ({"kv_dtype": "bfloat16"}, {"kv_dtype": "float32"}, "bfloat16>float32", 0.05),
    "int8": ({"wire_codec": "int8", **FORCED}, {}, "int8", 0.05),
    "fp8": ({"wire_codec": "fp8", **FORCED}, {}, "fp8", 0.3),
    "bf16 to f32 by int8 in other blocks": (
        {"kv_dtype": "bfloat16", "wire_codec": "int8", "block_tokens": 24, **FORCED}, {}, "bfloat16>float32+int8", 0.1,
    ),
}  # fmt: skip


@contextmanager
def opened(folder: Path, prefill: dict[str, Any], decode: dict[str, Any], **both: Any) -> Iterator[Loopback]:
    # Deterministic kernels want block sizes that divide their tile; fp32 gives the same tokens without them.
    is_tileable = all(128 % side.get("block_tokens", 16) == 0 for side in (prefill, decode))
    settings = {"chunk_tokens": 64, "is_deterministic": is_tileable, **both}
    with closing(Loopback(folder, MODEL, prefill=prefill, decode=decode, **settings)) as pair:
        yield pair


def chain_at(rank: Rank, tokens: list[int], lossy: str = "") -> list[bytes]:
    size = rank.context.engine.layout.groups[0].block_tokens
    root = HashRoot(fingerprint=rank.context.fingerprint, block_tokens=size, lossy=lossy).digest()
    return list(chain(root, tokens, size))


def held(rank: Rank, hashes: list[bytes]) -> list[BlockId]:
    """The blocks that the rank files under these hashes, as far as it has them."""
    ledger = rank.context.engine.ledgers[0]
    found = [ledger.lookup(block_hash) for block_hash in hashes]  # type: ignore[arg-type]
    return [block for block in found if block is not None]


def kv_of(rank: Rank, blocks: list[BlockId]) -> Tensor:
    """[layers, planes, heads, tokens, width] of these blocks, one after another, in fp32."""
    pool = rank.pools[GroupId(0)]
    spec = pool.spec
    out = bytearray(len(blocks) * spec.block_bytes())
    pool.read_into(blocks, range(len(spec.layers)), range(spec.heads), memoryview(out))
    shape = (len(blocks), len(spec.layers), spec.planes, spec.heads, spec.block_tokens, spec.width)
    flat = torch.frombuffer(out, dtype=getattr(torch, spec.dtype)).view(shape).float()
    return flat.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)


def transferred(pair: Loopback, name: str, prompt: list[int], **more: Any) -> list[int]:
    pair.submit(name, prompt, **{**ANSWER, **more})
    pair.run_until_rest()
    assert not pair.failed[name], pair.failed[name]
    pair.p.check_baseline()
    pair.d.check_baseline()
    return pair.tokens(name)


def on_its_own(pair: Loopback, name: str, prompt: list[int]) -> list[int]:
    """The decode worker's own answer, from no cache."""
    return transferred(pair, name, prompt, is_whole=True, salt=b"another tenant")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_other_block_sizes_are_exact(folder: Path, transport: str, prefill: int, decode: int) -> None:
    with opened(folder, {"block_tokens": prefill}, {"block_tokens": decode}, transport=transport) as pair:
        for length in LENGTHS:
            prompt = prompt_of(length, seed=length)
            cold = transferred(pair, f"cold{length}", prompt)
            full = length // decode
            assert len(held(pair.d, chain_at(pair.d, prompt))) == full  # the exact root of its own size
            before = pair.d.context.counters["kv_skipped_blocks"]
            warm = transferred(pair, f"warm{length}", prompt)
            assert pair.d.context.counters["kv_skipped_blocks"] == before + full
            assert cold == warm == on_its_own(pair, f"own{length}", prompt)
            common = min(length // prefill * prefill, full * decode)
            if common:
                at_p = kv_of(pair.p, held(pair.p, chain_at(pair.p, prompt)))
                at_d = kv_of(pair.d, held(pair.d, chain_at(pair.d, prompt)))
                assert torch.equal(at_p[..., :common, :], at_d[..., :common, :])


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_only_what_the_receiver_lacks_is_sent_in_its_blocks(folder: Path, prefill: int, decode: int) -> None:
    with opened(folder, {"block_tokens": prefill}, {"block_tokens": decode}) as pair:
        shared, rest = prompt_of(100), prompt_of(90, seed=3)
        transferred(pair, "a", shared)
        counters = pair.d.context.counters
        received = counters["kv_received_bytes"]
        expected = on_its_own(pair, "own", shared + rest)
        assert transferred(pair, "b", shared + rest) == expected
        skipped = 100 // decode
        assert counters["kv_skipped_blocks"] == skipped
        spec = pair.d.pools[GroupId(0)].spec
        blocks = spec.blocks_for(190) - skipped
        assert counters["kv_received_bytes"] - received == blocks * spec.block_bytes()
        assert pair.p.context.counters["kv_sent_bytes"] == counters["kv_received_bytes"]


@pytest.mark.parametrize("case", LOSSY)
def test_changed_bytes_get_a_root_of_their_own(folder: Path, case: str) -> None:
    prefill, decode, lossy, tolerance = LOSSY[case]
    with opened(folder, prefill, decode) as pair:
        size = pair.d.context.engine.layout.groups[0].block_tokens
        prompt = prompt_of(100)
        tokens = transferred(pair, "cold", prompt)
        every = prompt + tokens
        hashes = pair.d.context.engine.ledgers[0].hashes()
        assert set(hashes) == set(chain_at(pair.d, every[:-1], lossy))  # what was generated from them, too
        assert not set(hashes) & set(chain_at(pair.d, every))
        # The next turn finds them, in the receiver's blocks.
        again = transferred(pair, "warm", prompt)
        assert again == tokens
        assert pair.d.context.counters["kv_skipped_blocks"] == 100 // size
        # A request that it computes itself finds nothing of them, and leaves exact blocks.
        pair.submit("own", prompt, is_whole=True, **ANSWER)
        pair.run_until_rest()
        assert pair.chunks["own"][0][0].cached_tokens == 0
        assert len(held(pair.d, chain_at(pair.d, prompt))) == 100 // size
        # Nor does the prompt's next transfer take those exact ones for its own.
        assert transferred(pair, "third", prompt) == tokens
        check_logprobs(pair, "cold", "own", tolerance)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 24)])
def test_a_codec_does_not_show_what_blocks_held_before(folder: Path, sizes: tuple[int, int]) -> None:
    """The prompt's one token in its last block arrives the same with any bytes around it."""
    answers = []
    for before in (0.0, 3e4):
        place = folder / str(before)
        place.mkdir()
        with opened(
            place, {"wire_codec": "int8", "block_tokens": sizes[0], **FORCED}, {"block_tokens": sizes[1]}
        ) as pair:
            pool = pair.p.pools[GroupId(0)]
            spec = pool.spec
            content = torch.full((spec.block_bytes() // 4,), before).view(torch.uint8).numpy().tobytes()
            for block in range(8):
                pool.write_from([BlockId(block)], range(len(spec.layers)), range(spec.heads), memoryview(content))
            tokens = transferred(pair, "a", prompt_of(49))
            chosen = [c.logprobs[0].logprob for c in sorted(pair.chunks["a"][0], key=lambda c: c.index)]
            assert held(pair.p, chain_at(pair.p, prompt_of(49)))[-1] < 7  # so its last block is one of these
            answers.append((tokens, chosen))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("case", ["f32 to bf16", "int8"])
def test_a_replay_goes_on_under_the_same_root(folder: Path, case: str) -> None:
    prefill, decode, lossy, _ = LOSSY[case]
    with opened(folder, prefill, decode) as pair:
        prompt = prompt_of(60)
        whole = transferred(pair, "a", prompt)
        forced = [g.ChoiceState(choice=0, tokens=whole[:4])]
        replayed = transferred(pair, "b", prompt, attempt=2, forced=forced)
        assert replayed[0] == whole[4]
        assert pair.d.context.counters["kv_skipped_blocks"] == 60 // 16
        known = chain_at(pair.d, prompt + whole[:4] + replayed, lossy)
        strays = (
            set(pair.d.context.engine.ledgers[0].hashes()) - set(known) - set(chain_at(pair.d, prompt + whole, lossy))
        )
        assert not strays


def test_tenants_share_no_changed_blocks_either(folder: Path) -> None:
    prefill, decode, _, _ = LOSSY["int8"]
    with opened(folder, prefill, decode) as pair:
        prompt = prompt_of(64)
        for salt in (b"one", b"other"):
            transferred(pair, f"of {salt!r}", prompt, salt=salt)
        assert pair.d.context.counters["kv_skipped_blocks"] == 0


def test_a_codec_is_not_used_on_a_link_that_nobody_found_slow(folder: Path) -> None:
    with opened(folder, {"wire_codec": "int8"}, {}) as pair:
        prompt = prompt_of(64)
        assert transferred(pair, "a", prompt) == on_its_own(pair, "own", prompt)
        assert len(held(pair.d, chain_at(pair.d, prompt))) == 4


@pytest.mark.parametrize("protocol", [(PROTOCOL[0], PROTOCOL[1] + 7), PROTOCOL])
def test_minor_versions_may_differ(folder: Path, protocol: tuple[int, int]) -> None:
    with opened(folder, {"protocol": protocol}, {"protocol": (PROTOCOL[0], PROTOCOL[1] + 1)}) as pair:
        prompt = prompt_of(40)
        assert transferred(pair, "a", prompt) == on_its_own(pair, "own", prompt)


def failed_at_both_ends(pair: Loopback, name: str, words: str) -> None:
    for _ in range(2000):
        pair.turn()
        if pair.p.is_at_rest() and pair.d.is_at_rest():
            break
    messages = [failure.message for failure in pair.failed[name]]
    assert messages
    assert any(words in message for message in messages), messages
    pair.p.check_baseline()
    pair.d.check_baseline()


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        ({"protocol": (PROTOCOL[0] + 1, 0)}, "protocol differs: 2.0 and 3.0"),
        ({"dtype": "bfloat16", "is_deterministic": False}, "compute dtype differs: float32 and bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_for_its_reason(folder: Path, decode: dict[str, Any], words: str) -> None:
    with opened(folder, {}, decode) as pair:
        pair.submit("r", prompt_of(40), **ANSWER)
        failed_at_both_ends(pair, "r", words)
        assert pair.failed["r"][0].code in ("pair_refused", "transfer_failed")


def _another_codec(ticket: w.Ticket) -> None:
    ticket.codec = "fp8"


def _another_block_size(ticket: w.Ticket) -> None:
    for group in ticket.profile.groups:
        group.block_tokens *= 2


def _no_block_size(ticket: w.Ticket) -> None:
    for group in ticket.profile.groups:
        group.block_tokens = 0


def _no_profile(ticket: w.Ticket) -> None:
    ticket.ClearField("profile")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_another_codec, "its codec is fp8 instead of none"),
        (_another_block_size, "0 + 3 blocks for a prompt of 2"),
        (_no_block_size, "blocks of 16 and 0 tokens"),
        (_no_profile, "protocol differs"),
    ],
)
def test_a_ticket_in_a_form_that_does_not_follow(folder: Path, change: Callable[[w.Ticket], None], words: str) -> None:
    with opened(folder, {}, {}) as pair:
        pair.submit("r", prompt_of(40), **ANSWER)
        forward(pair, pair.d, "ticket", change)
        failed_at_both_ends(pair, "r", words)


def check_logprobs(pair: Loopback, name: str, reference: str, tolerance: float) -> None:
    """Check logprobs: while both answers are the same, they agree within `tolerance`; where they part, the other's
    token was among the best five, and nearly as good."""
    ours, theirs = (
        [c.logprobs[0] for c in sorted(pair.chunks[n][0], key=lambda c: c.index)] for n in (name, reference)
    )
    for mine, other in zip(ours, theirs, strict=True):
        top = {candidate.token: candidate.logprob for candidate in other.top}
        if mine.token != other.token:
            assert mine.token in top
            assert other.logprob - top[mine.token] < 2 * tolerance
            return
        assert abs(mine.logprob - other.logprob) < tolerance, (mine.logprob, other.logprob)
