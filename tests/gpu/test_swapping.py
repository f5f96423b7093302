"""KV that waited in the host's pinned memory is the same on the device, also at other places."""

from __future__ import annotations

import pytest
import torch

from tandem.core.clock import MonotonicClock
from tandem.engine.kv_offload import PoolCopies
from tandem.engine.kv_pool import KVPools
from tandem.engine.model_config import read_model_config
from tandem.engine.pool_plan import kv_layout
from tandem.engine.swapping import Swap
from tests.unit.engine.bundled import MODEL


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_come_back(dtype: str) -> None:
    layout = kv_layout(read_model_config(MODEL), dtype=dtype, block_tokens=16)
    pools = KVPools(layout, (64,), torch.device("cuda"))
    copies, pool = PoolCopies(pools), pools.tensors[0]
    pool.normal_()
    before = pool.clone()
    saved = copies.save(0, list(range(5, 25)))
    assert saved is not None
    assert saved.is_pinned()
    pool[5:25] = 0
    copies.restore(0, list(range(40, 55)), saved, 5)
    assert pool[40:55].equal(before[10:25])
    assert pool[55:].equal(before[55:])
    swap = Swap(copies, layout, 1 << 30, MonotonicClock())
    swap.try_speeds()
    assert min(swap.save_bytes_per_s, swap.restore_bytes_per_s) > 0
