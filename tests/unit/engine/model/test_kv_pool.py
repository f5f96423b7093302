"""Pools have the documented shape, share their bytes, and a budget buys the blocks it should."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from tandem.core.errors import StartupError
from tandem.core.ids import GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.engine.kv_pool import KVPools
from tandem.engine.pool_plan import plan_blocks

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
