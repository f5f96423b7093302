"""A calibration as the planner's rates: what a cluster is told before it has measured anything."""

from __future__ import annotations

from tandem.cluster.planner.records import Rates
from tandem.cluster.simulator.calibration import Calibration
from tandem.core.prefill_queue import QueueRules


def known(calibration: Calibration, queue: QueueRules) -> Rates:
    """What settings and links say; how fast workers are, they measure."""
    return Rates(
        max_step_s=min(calibration.max_step_s, calibration.chunk_tokens * calibration.prefill_token_s),
        max_sequences=calibration.max_sequences,
        kv_tokens=calibration.kv_tokens,
        kv_token_bytes=calibration.kv_token_bytes,
        link_bytes_per_s=calibration.link_bytes_per_s,
        queue=queue,
    )
