"""A decode worker reduced to two threads' work, in a process of its own: steps of running answers, and receiving.

    python -m bench.kvtransfer.decoding '{"role": "receiver", "transport": "shm", "spec": "square", …}'

Engine and receiver are the product's; the simulated runner writes and reads back KV, and its steps last at least as
long as asked. As in a worker, the step loop and the transport's threads share one interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from bench.kvtransfer.children import serve
from bench.kvtransfer.ends import ReceiverEnd
from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.config import SimSection
from tandem.core.ids import GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.memory import freeze_gc
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest
from tandem.engine.sim.runner import SimRunner

SPEC = KVGroupSpec(
    group=GroupId(0), layers=tuple(range(4)), planes=2, heads=2, width=32, block_tokens=16, dtype="bfloat16"
)
CONTEXT = 1 << 14
PROMPT = tuple(7 * place % 3000 + 600 for place in range(256))
SETTLE_STEPS = 20


class DecodingEnd(ReceiverEnd):
    """A receiver in a process that also generates."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        if options["step_core"] is not None:  # this thread; those that receive stay where the process was started
            os.sched_setaffinity(0, {options["step_core"]})
        runner = SimRunner(
            KVLayout(groups=(SPEC,)), [8192], vocab_size=4096, max_model_len=CONTEXT,
            timing=SimSection(decode_step_s=options["step_s"]),
        )  # fmt: skip
        self._engine = Engine(runner, clock=MonotonicClock())
        sampling = SamplingParams(max_tokens=CONTEXT - len(PROMPT) - 1, temperature=0, ignore_eos=True)
        for number in range(options["answers"]):
            prompt = (number, *PROMPT)
            self._engine.add(
                EngineRequest(key=str(number), prompt=prompt, sampling=sampling, hash_root=BlockHash(b"r"))
            )
        for _ in range(SETTLE_STEPS):
            self._engine.step()

    def decode(self, seconds: float) -> dict[str, Any]:
        """Generate for so long; returns the gaps between tokens of every answer, and a step's time besides waiting."""
        gaps: list[float] = []
        end_s, used_s, before_s = time.monotonic() + seconds, time.thread_time(), time.monotonic()
        while before_s < end_s:
            result = self._engine.step()
            if result.failed or not result.outputs:
                raise RuntimeError(f"a step failed: {result.failed}")
            now_s = time.monotonic()
            gaps.append(now_s - before_s)
            before_s = now_s
        return {"gaps_s": gaps, "busy_s": (time.thread_time() - used_s) / len(gaps)}


def main() -> None:
    end = DecodingEnd(json.loads(sys.argv[1]))
    freeze_gc()
    print(json.dumps(end.hello()), flush=True)
    try:
        serve({"expect": end.expect, "settle": end.settle, "decode": end.decode})
    finally:
        end.close()


if __name__ == "__main__":
    main()
