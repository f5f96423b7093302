"""The share of a worker's blocks that a leg takes, until the worker's own reports count it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tandem.core.block_hash import BlockHash, HashRoot, chain
from tandem.core.ids import RequestId, WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.sampling import SamplingParams
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest
from tandem.router.workers.prefix_lookup import PrefixFinder
from tandem.router.workers.proto_convert import BlockCounts, ReportedLoad
from tests.unit.router.facts import facts
from tests.unit.router.stage import Stage, in_loop

PROMPT = list(range(160))
BLOCKS = BlockCounts(group=0, total=100, free=100, cached=0, request=0, pushing=0, reserved=0)


class Held:
    """An index in which d1 holds so many leading blocks of PROMPT, by HashRoot.lossy."""

    def __init__(self, **blocks: int) -> None:
        self._depths: dict[BlockHash, int] = {}
        for lossy, count in blocks.items():
            root = HashRoot(fingerprint="f", block_tokens=16, lossy=lossy).digest()
            self._depths |= {block: depth for depth, block in enumerate(chain(root, PROMPT, 16)[:count], start=1)}

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        return {WorkerId("d1"): max((self._depths.get(block, 0) for block in hashes), default=0)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("exact", "converted"), [(7, 0), (0, 6), (7, 6), (0, 0)])
@in_loop
async def test_a_pair_s_decode_worker_reserves_what_it_lacks_in_the_form_in_which_the_pair_moves_blocks(
    dtype: str, exact: int, converted: int
) -> None:
    index = Held(**{"": exact, "float32>bfloat16": converted})
    stage = Stage("p1", "d1", finder=lambda clock: PrefixFinder(index, b""))
    stage.link("p1").facts = facts("p1", RoleName.PREFILL, incarnation=1)
    link = stage.link("d1")
    link.facts, link.load = facts("d1", RoleName.DECODE, dtype=dtype, incarnation=2), ReportedLoad(blocks=(BLOCKS,))
    asked = GenerationRequest(prompt=PROMPT, sampling=SamplingParams(max_tokens=9), timeout_s=60.0)
    with stage.dispatcher.submit(RequestId("r"), 0, asked, ArrivalQueue(1 << 20)) as flight:
        held = exact if dtype == "float32" else converted
        assert flight.plan.prefill == "p1"
        assert flight.plan.decode_hit_tokens == 16 * held
        (sent,) = link.outstanding.uncounted(stage.clock.now_s())
        assert sent.blocks == 10 - held + 1, "what it lacks, and one for the answer"
        (decode,) = [one for one in stage.table.candidates() if one.worker == "d1"]
        assert decode.free_blocks == 100 - sent.blocks
