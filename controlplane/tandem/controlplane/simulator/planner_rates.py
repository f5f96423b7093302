"""A calibration as the planner's rates: those that a cluster is configured with, and those that it would measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.controlplane.planner.records import Rates
from tandem.controlplane.simulator.calibration import Calibration
from tandem.core.prefill_queue import PrefillSpeed, QueueRules

SETTINGS = ("max_sequences", "kv_tokens", "kv_token_bytes", "link_bytes_per_s")
STEPS = ("prefill_step_s", "decode_step_s", "decode_sequence_s", "decode_context_s")
"""Fields of a calibration and of rates alike."""


def known(calibration: Calibration, queue: QueueRules) -> Rates:
    """Return the rates of settings and links; workers' speeds are measured."""
    max_step_s = min(calibration.max_step_s, calibration.chunk_tokens * calibration.prefill_token_s)
    return Rates(max_step_s=max_step_s, queue=queue, **_values(calibration, SETTINGS))


def calibrated(calibration: Calibration, queue: QueueRules) -> Rates:
    """Return all rates of the calibration."""
    token_s = calibration.prefill_token_s
    speed = PrefillSpeed(tokens_per_s=1 / token_s if token_s else 1e12, context_s=calibration.prefill_context_s)
    return replace(known(calibration, queue), prefill=speed, **_values(calibration, STEPS))


def _values(calibration: Calibration, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(calibration, name) for name in names}
