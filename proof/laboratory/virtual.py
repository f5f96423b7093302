"""The same requests in the laboratory, calibrated by the engine's settings and by the idle cluster's times."""

from __future__ import annotations

import dataclasses

from proof.laboratory.real import Idle
from proof.laboratory.runs import DECODE, LONG, PREFILL, SHORT, Run, Served
from tandem.controlplane.simulator.calibration import Calibration, of_sim_engine
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulator import Simulator
from tandem.controlplane.simulator.traces import RequestLog
from tandem.core.config import SIM_KV_BYTES, AdmissionSection, Disaggregation
from tandem.router.routing.policies import create_policy

LINK_BYTES_PER_S = 1e9
"""About that of loopback; a prompt's KV of 2 MB takes a thousandth of the time that the prompt is computed in."""


def calibration(run: Run, idle: Idle) -> Calibration:
    """Calibration by the settings, and by the idle cluster's times: a real step has more to do than arithmetic, and the
    time of a first token beyond its prompt is the way there and back."""
    worker, sim = run.worker, run.worker.sim
    token_s = max(1 / sim.prefill_tokens_per_s, (idle.long_s - idle.short_s) / (LONG - SHORT))
    kv_bytes = worker.kv_memory_bytes or SIM_KV_BYTES
    by_settings = of_sim_engine(
        worker, kv_token_bytes=kv_bytes // idle.kv_tokens, link_bytes_per_s=LINK_BYTES_PER_S,
        rpc_s=max(0.0, idle.short_s - SHORT * token_s) / 2,
    )  # fmt: skip
    return dataclasses.replace(
        by_settings, kv_tokens=idle.kv_tokens, prefill_token_s=token_s,
        decode_step_s=max(sim.decode_step_s, idle.step_s - sim.decode_sequence_s),
    )  # fmt: skip


def play(run: Run, trace: RequestLog, idle: Idle) -> tuple[list[Served], list[float]]:
    """Return the outcome of every request, and seconds in steps of every worker that computes prompts."""
    setup = Setup(
        policy=create_policy(run.policy, Disaggregation.AUTO), queue=run.queue, prefill=PREFILL, decode=DECODE,
        calibration=calibration(run, idle), max_tokens=None, admission=AdmissionSection(),
    )  # fmt: skip
    outcome = Simulator(setup, trace).run()
    served = [
        Served(ttft_s=r.ttft_s, e2e_s=r.e2e_s, prompt_tokens=r.prompt_tokens, cached_tokens=r.cached_tokens)
        for r in outcome.records
    ]
    return served, [work.busy_s for work in outcome.work if work.role != "decode"]
