"""The simulated engine in real ranks: what crosses is verified by the answer, and a worker is there without torch."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import BlockId, GroupId
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Loopback, prompt_of
from tests.integration.worker.pair import MODEL, pair, shape_in, submit, tokens_of

VOCAB = 4096
EOS = (1,)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A model folder without weights."""
    return shape_in(tmp_path / "tandem-tiny")


def oracle(prompt: list[int], count: int, **options: Any) -> list[int]:
    return expected_tokens(prompt, count, VOCAB, eos_token_ids=EOS, **options)


@pytest.fixture(params=["shm", "grpc"])
def loopback(folder: Path, shape: Path, request: pytest.FixtureRequest) -> Iterator[Loopback]:
    pair = Loopback(folder, shape, engine="sim", transport=request.param, chunk_tokens=64)
    yield pair
    pair.close()


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 200, 700])
def test_a_transfer_gives_the_oracles_tokens(loopback: Loopback, tokens: int) -> None:
    prompt = prompt_of(tokens)
    for name in ("cold", "warm"):
        loopback.submit(name, prompt, max_tokens=20)
        loopback.run_until_rest()
        assert loopback.tokens(name) == oracle(prompt, 20)
    loopback.p.check_baseline()
    loopback.d.check_baseline()


def test_a_wrong_byte_at_the_receiver_changes_the_answer(loopback: Loopback) -> None:
    """One bit of a cached block is turned between two requests: the second notices."""
    prompt = prompt_of(100)
    loopback.submit("a", prompt, max_tokens=20)
    loopback.run_until_rest()
    ledger, pool = loopback.d.context.engine.ledgers[0], loopback.d.pools[GroupId(0)]
    block = ledger.lookup(next(iter(ledger.hashes())))
    assert block is not None
    spec = pool.spec
    content = bytearray(spec.block_bytes())
    everything = ([BlockId(block)], range(len(spec.layers)), range(spec.heads))
    pool.read_into(*everything, memoryview(content))
    content[len(content) // 2] ^= 16
    pool.write_from(*everything, memoryview(content))
    loopback.submit("b", prompt, max_tokens=20)
    loopback.run_until_rest()
    assert loopback.tokens("a") == oracle(prompt, 20)
    assert loopback.tokens("b")[0] == oracle(prompt, 1)[0], "the prefill worker's blocks are good"
    assert loopback.tokens("b")[1:] != oracle(prompt, 20)[1:]


def test_choices_and_replays(loopback: Loopback) -> None:
    from tandem.core.sampling import SamplingParams
    from tandem.rpc.v1 import generation_pb2 as g

    prompt = prompt_of(37)
    settings: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 9}
    loopback.submit("a", prompt, **settings)
    loopback.run_until_rest()
    params = SamplingParams(**settings)
    whole = [oracle(prompt, 9, sampling=params, choice=choice) for choice in range(3)]
    assert [loopback.tokens("a", choice) for choice in range(3)] == whole
    forced = [g.ChoiceState(choice=choice, tokens=whole[choice][:4]) for choice in range(3)]
    loopback.submit("b", prompt, attempt=2, forced=forced, **settings)
    loopback.run_until_rest()
    assert [loopback.tokens("b", choice) for choice in range(3)] == [tokens[4:] for tokens in whole]


@pytest.mark.parametrize("forced", [1, 5, 40])
def test_a_replay_whose_prompt_is_cached_whole(loopback: Loopback, forced: int) -> None:
    """The prefill worker has every block of the prompt and computes outputs alone; it hands over all the same."""
    from tandem.rpc.v1 import generation_pb2 as g

    prompt = prompt_of(96)
    whole = oracle(prompt, 50)
    loopback.submit("a", prompt, max_tokens=50)
    loopback.run_until_rest()
    state = g.ChoiceState(choice=0, tokens=whole[:forced])
    loopback.submit("b", prompt, attempt=2, forced=[state], max_tokens=50)
    loopback.run_until_rest(5000)
    assert loopback.tokens("b") == whole[forced:]
    loopback.p.check_baseline()
    loopback.d.check_baseline()


@pytest.mark.parametrize(
    ("at_p", "at_d"),
    [("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "float16"), ("bfloat16", "bfloat16")],
)
def test_conversion_between_kv_dtypes_keeps_the_answer(folder: Path, shape: Path, at_p: str, at_d: str) -> None:
    own = {"prefill": {"kv_dtype": at_p}, "decode": {"kv_dtype": at_d}}
    with closing(Loopback(folder, shape, **own, engine="sim")) as loopback:
        prompt = prompt_of(150)
        loopback.submit("r", prompt, max_tokens=20)
        loopback.run_until_rest()
        assert loopback.tokens("r") == oracle(prompt, 20)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_lossy_codec_is_noticed(folder: Path, shape: Path, codec: str) -> None:
    settings: dict[str, Any] = {"engine": "sim", "wire_codec": codec, "wire_codec_below_bytes_per_s": 1e18}
    with closing(Loopback(folder, shape, **settings)) as loopback:
        prompt = prompt_of(150)
        loopback.submit("r", prompt, max_tokens=20)
        loopback.run_until_rest()
        assert loopback.tokens("r")[0] == oracle(prompt, 1)[0], "computed by the prefill worker"
        assert loopback.tokens("r")[1:] != oracle(prompt, 20)[1:]


def test_simulated_and_computing_workers_do_not_pair(folder: Path) -> None:
    with closing(Loopback(folder, MODEL, prefill={"engine": "sim"}, kv_memory_bytes=64 << 20)) as loopback:
        sim, model = loopback.p.context.profile, loopback.d.context.profile
        assert sim.fingerprint != model.fingerprint
        assert dict(sim.identity)["compute_dtype"] == "sim"


def mapped(pid: int) -> str:
    """Files in the memory of a process."""
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.exec_start
def test_worker_processes_without_torch(folder: Path, shape: Path) -> None:
    """Two real workers on a real Redis serve, and no library of torch is mapped by any of their processes."""
    prompt = prompt_of(100)

    async def serve() -> tuple[list[int], list[str]]:
        async with pair(folder, model=shape, engine="sim") as (p, d):
            await d.send(submit=submit("r1", w.LEG_DECODE, p, prompt, max_tokens=12))
            await p.send(submit=submit("r1", w.LEG_PREFILL, d, prompt, max_tokens=12))
            tokens = await tokens_of(p, "r1", 1) + await tokens_of(d, "r1", 11, start=1)
            pids = [pid for worker in (p, d) for pid in (worker.process.pid, worker.rank_pid)]
            return tokens, [mapped(pid) for pid in pids]

    tokens, maps = asyncio.run(serve())
    assert tokens == oracle(prompt, 12)
    assert not [line for text in maps for line in text.splitlines() if "torch" in line]


def test_ranks_of_simulated_workers(folder: Path, tmp_path: Path) -> None:
    """Two ranks to four, which hold each of the two KV heads twice: the answer depends on every copy."""
    shape = shape_in(tmp_path / "tandem-tiny", num_key_value_heads=2)
    prompt = prompt_of(100)

    async def serve() -> list[int]:
        async with pair(folder, model=shape, engine="sim", prefill={"tp": 2}, decode={"tp": 4}) as (p, d):
            await d.send(submit=submit("r1", w.LEG_DECODE, p, prompt, max_tokens=12))
            await p.send(submit=submit("r1", w.LEG_PREFILL, d, prompt, max_tokens=12))
            return await tokens_of(p, "r1", 1) + await tokens_of(d, "r1", 11, start=1)

    assert asyncio.run(serve()) == oracle(prompt, 12)


def test_the_shape_is_read_from_the_folder(folder: Path, tmp_path: Path) -> None:
    shape = shape_in(tmp_path / "tandem-tiny", vocab_size=5000, eos_token_id=[3, 4])
    with closing(Loopback(folder, shape, engine="sim")) as loopback:
        prompt = prompt_of(30)
        loopback.submit("r", prompt, max_tokens=30)
        loopback.run_until_rest()
        assert loopback.tokens("r") == expected_tokens(prompt, 30, 5000, eos_token_ids=(3, 4))
