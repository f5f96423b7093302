"""A calibration as the planner's rates: those that a cluster is configured with, and those that it would measure."""

from __future__ import annotations

from dataclasses import replace

from tandem.controlplane.planner.records import Rates
from tandem.controlplane.simulator.calibration import Calibration
from tandem.core.prefill_queue import PrefillSpeed, QueueRules


def known(calibration: Calibration, queue: QueueRules) -> Rates:
    """Return the rates of settings and links; workers' speeds are measured."""
    return Rates(
        max_step_s=min(calibration.max_step_s, calibration.chunk_tokens * calibration.prefill_token_s),
        max_sequences=calibration.max_sequences,
        kv_tokens=calibration.kv_tokens,
        kv_token_bytes=calibration.kv_token_bytes,
        link_bytes_per_s=calibration.link_bytes_per_s,
        queue=queue,
    )


def calibrated(calibration: Calibration, queue: QueueRules) -> Rates:
    """Return all rates of the calibration."""
    token_s = calibration.prefill_token_s
    return replace(
        known(calibration, queue),
        prefill=PrefillSpeed(tokens_per_s=1 / token_s if token_s else 1e12, context_s=calibration.prefill_context_s),
        prefill_step_s=calibration.prefill_step_s,
        decode_step_s=calibration.decode_step_s,
        decode_sequence_s=calibration.decode_sequence_s,
        decode_context_s=calibration.decode_context_s,
    )


def calibration_of(rates: Rates, name: str) -> Calibration:
    """Convert rates by arithmetic (`planner.hardware`) to a calibration. Values not in the rates stay the default."""
    return Calibration(
        name=name,
        prefill_step_s=rates.prefill_step_s,
        prefill_token_s=1 / rates.prefill.tokens_per_s,
        prefill_context_s=rates.prefill.context_s,
        decode_step_s=rates.decode_step_s,
        decode_sequence_s=rates.decode_sequence_s,
        decode_context_s=rates.decode_context_s,
        kv_token_bytes=rates.kv_token_bytes,
        kv_tokens=rates.kv_tokens,
        link_bytes_per_s=rates.link_bytes_per_s,
        max_sequences=rates.max_sequences,
    )
