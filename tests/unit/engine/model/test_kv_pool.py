"""Test the pool of KV blocks: layout, data types and swapping.

The pools of a CPU stand for a device's: a worker on a CPU keeps nothing, for its KV is in host memory already.
"""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.clock import MonotonicClock
from tandem.core.errors import StartupError
from tandem.core.ids import GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.engine import kv_pool
from tandem.engine.engine import Engine
from tandem.engine.kv_pool import KVPools, PoolCopies
from tandem.engine.pool_plan import plan_blocks
from tandem.engine.runner import ModelRunner
from tandem.engine.swapping import Swap
from tests.unit.engine.bundled import Answers, request, run
from tests.unit.engine.model.driver import Driver, random_tokens

CPU = torch.device("cpu")


def group(number: int, layers: tuple[int, ...], *, dtype: str = "float32", window: int | None = None) -> KVGroupSpec:
    return KVGroupSpec(
        group=GroupId(number), layers=layers, planes=2, heads=2, width=8, block_tokens=16, dtype=dtype, window=window
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def two_groups() -> KVLayout:
    """Full attention on the odd layers; on the even ones a latent of one plane and head, with a window."""
    latent = KVGroupSpec(
        group=GroupId(1), layers=(0, 2), planes=1, heads=1, width=24, block_tokens=8, dtype="bfloat16", window=20
    )
    return KVLayout(groups=(group(0, (1, 3, 4)), latent))


def test_every_layer_finds_its_view_in_its_group() -> None:
    pools = KVPools(two_groups(), (10, 6), CPU)
    assert [tuple(t.shape) for t in pools.tensors] == [(10, 3, 2, 2, 16, 8), (6, 2, 1, 1, 8, 24)]
    assert pools.group_of_layer == (1, 0, 1, 0, 0)
    pools.layer_views[3][4, 1, 0, 2] = 5.0
    assert pools.tensors[0][4, 1, 1, 0, 2].eq(5.0).all()
    assert pools.layer_views[2].dtype is torch.bfloat16


def test_bytes_are_the_pool_itself_and_outlive_it() -> None:
    pools = KVPools(two_groups(), (10, 6), CPU)
    for number, spec in enumerate(pools.layout.groups):
        data = pools.pool_bytes(number)
        assert (data.readonly, data.format, data.nbytes) == (False, "B", pools.num_blocks[number] * spec.block_bytes())
    start = 3 * pools.layout.groups[1].block_bytes()
    pools.pool_bytes(1)[start : start + 2] = b"\x80\x3f"  # bf16 1.0
    assert pools.tensors[1][3].flatten()[0] == 1.0
    kept = pools.pool_bytes(1)
    del pools
    assert bytes(kept[start : start + 2]) == b"\x80\x3f"


def test_a_pool_is_zero_and_takes_memory_where_it_is_touched() -> None:
    before, layout = _resident_bytes(), KVLayout(groups=(group(0, (0,)),))
    pools = KVPools(layout, ((1 << 30) // layout.groups[0].block_bytes(),), CPU)
    pools.layer_views[0][3] = 1.0
    assert pools.tensors[0][:5].sum() == pools.tensors[0][3].numel()
    assert _resident_bytes() - before < 256 << 20


def test_one_group_gets_the_whole_budget() -> None:
    layout = KVLayout(groups=(group(0, (0, 1)),))
    block = layout.groups[0].block_bytes()
    assert plan_blocks(layout, 7 * block, 16) == (7,)
    assert plan_blocks(layout, 8 * block - 1, 16) == (7,)


def test_groups_share_a_budget_by_tokens() -> None:
    layout = two_groups()
    counts = plan_blocks(layout, 100_000, 64)
    tokens = [count * spec.block_tokens for count, spec in zip(counts, layout.groups, strict=True)]
    assert max(tokens) - min(tokens) < 16
    assert sum(c * g.block_bytes() for c, g in zip(counts, layout.groups, strict=True)) <= 100_000


def test_too_little_says_how_much_is_needed() -> None:
    layout = KVLayout(groups=(group(0, (0, 1)),))
    with pytest.raises(StartupError, match=r"one sequence of 33 tokens: it holds 32.*--kv-memory (\d+)KiB") as caught:
        plan_blocks(layout, 2 * layout.groups[0].block_bytes(), 33)
    named = int(str(caught.value).split("--kv-memory ")[1].split("KiB")[0]) * 1024
    assert plan_blocks(layout, named, 33) >= (3,)


def test_memory_that_is_not_there_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match=r"cannot allocate .*GiB of KV memory on cpu"):
        KVPools(KVLayout(groups=(group(0, (0,)),)), (1 << 46,), CPU)


@pytest.mark.parametrize(("layers", "complaint"), [((0, 2), "without gaps"), ((1, 1), "in two KV groups")])
def test_layers_must_be_covered_once(layers: tuple[int, int], complaint: str) -> None:
    layout = KVLayout(groups=(group(0, layers[:1]), group(1, layers[1:])))
    with pytest.raises(ValueError, match=complaint):
        KVPools(layout, (1, 1), CPU)


def runner_of(folder: Any, **options: Any) -> ModelRunner:
    return ModelRunner(model_dir=folder, **({"num_blocks": 40, "max_model_len": 256} | options))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_the_pool_holds_rounded_numbers_and_the_logits_are_near(kv_dtype: str, model_folder: Any) -> None:
    folder, tokens = model_folder("qwen3"), random_tokens(150, 512)
    exact = Driver(runner_of(folder, dtype="float32"))
    small = Driver(runner_of(folder, dtype="float32", kv_dtype=kv_dtype))
    assert (small.runner.dtype, small.runner.kv_dtype) == ("float32", kv_dtype)
    assert [group.dtype for group in small.runner.layout.groups] == [kv_dtype]
    assert small.runner.pools.tensors[0].dtype is getattr(torch, kv_dtype)
    want, got = exact.step({"a": tokens})["a"], small.step({"a": tokens})["a"]
    # The first layer's keys and values know nothing of the pool: they are the exact ones, rounded once.
    for one, other in zip(small.stored_kv("a", 0), exact.stored_kv("a", 0), strict=True):
        assert torch.equal(one, other.to(one.dtype))
    difference = (torch.log_softmax(got, -1) - torch.log_softmax(want, -1)).abs()
    assert 0 < difference.mean() < 0.02


def test_chunks_and_decodes_read_what_a_whole_prompt_reads(model_folder: Any) -> None:
    """New tokens too attend to the stored numbers: how a prompt was cut changes nothing but rounding in fp32."""
    tokens = random_tokens(150, 512)
    driver = Driver(runner_of(model_folder("qwen2"), dtype="float32", kv_dtype="bfloat16"))
    whole = driver.step({"a": tokens})["a"]
    chunked = torch.cat([driver.chunked("b", tokens[:140], 33), *(driver.step({"b": [t]})["b"] for t in tokens[140:])])
    # A number on the edge between two bf16 values may fall to the other side: hence no tighter bound.
    torch.testing.assert_close(chunked, whole, atol=0.02, rtol=0)


def test_wider_kv_than_the_computation(model_folder: Any) -> None:
    """fp32 KV of a bf16 model holds bf16 numbers: the same logits, bit for bit."""
    tokens = random_tokens(100, 512)
    plain, wide = (
        Driver(runner_of(model_folder("llama"), dtype="bfloat16", kv_dtype=name)) for name in ("auto", "float32")
    )
    assert torch.equal(plain.step({"a": tokens})["a"], wide.step({"a": tokens})["a"])
    assert torch.equal(plain.step({"a": [5]})["a"], wide.step({"a": [5]})["a"])
    assert torch.equal(plain.stored_kv("a", 1)[0].float(), wide.stored_kv("a", 1)[0])


def test_half_the_bytes_buy_twice_the_blocks(model_folder: Any) -> None:
    sizes = [
        runner_of(model_folder("llama"), dtype="float32", kv_dtype=name, kv_bytes=1 << 20, num_blocks=None).num_blocks
        for name in ("auto", "float16")
    ]
    assert sizes[1] == (2 * sizes[0][0],)


def answers(runner: ModelRunner, swap: Swap | None, prompts: list[list[int]]) -> Answers:
    engine = Engine(runner, clock=MonotonicClock(), swap=swap)
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "logprobs": 2}
    return run(engine, *(request(f"r{index}", prompt, **options) for index, prompt in enumerate(prompts)))


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16"])
def test_no_bit_changes(model_folder: Any, kv_dtype: str) -> None:
    options: dict[str, Any] = {"max_model_len": 128, "is_deterministic": True, "kv_dtype": kv_dtype}
    folder = model_folder("qwen3")
    roomy = ModelRunner(model_dir=folder, num_blocks=64, **options)
    tight = ModelRunner(model_dir=folder, num_blocks=12, **options)
    prompts = [random_tokens(30, roomy.vocab_size, seed) for seed in range(3)]
    wanted = answers(roomy, None, prompts)
    quick = {"save_bytes_per_s": 1e12, "restore_bytes_per_s": 1e12}
    swap = Swap(PoolCopies(tight.pools), tight.layout, 1 << 30, MonotonicClock(), **quick)
    found = answers(tight, swap, prompts)
    assert not wanted.preempted
    assert found.preempted
    assert swap.requests > 0
    assert swap.tokens > 0
    assert found.scored() == wanted.scored()


@pytest.mark.parametrize("pieces", [1, 2, 1 << 20])
def test_copies_bring_blocks_back_to_other_places(
    model_folder: Any, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many blocks are gathered at a time."""
    runner = ModelRunner(model_dir=model_folder("llama"), num_blocks=20, max_model_len=64)
    copies, pool = PoolCopies(runner.pools), runner.pools.tensors[0]
    monkeypatch.setattr(kv_pool, "PIECE_BYTES", pieces * pool[0].nbytes)
    pool.normal_()
    before = pool.clone()
    saved = copies.save(0, [3, 5, 7])
    assert saved is not None
    pool[[3, 5, 7]] = 0
    copies.restore(0, [11, 2], saved, 1)
    assert pool[11].equal(before[5])
    assert pool[2].equal(before[7])
    untouched = [block for block in range(20) if block not in (2, 3, 5, 7, 11)]
    assert pool[untouched].equal(before[untouched])


def test_real_copies_have_a_speed(model_folder: Any) -> None:
    runner = ModelRunner(model_dir=model_folder("llama"), num_blocks=20, max_model_len=64)
    swap = Swap(PoolCopies(runner.pools), runner.layout, 1 << 30, MonotonicClock())
    swap.try_speeds()
    assert swap.save_bytes_per_s > 0
    assert 0 < swap.seconds(64) < 1
