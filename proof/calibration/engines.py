"""The two engines: how a cluster of each is started, and the measurements of it before any run."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.engine.__main__ import measured, moves
from bench.load import body_of
from bench.models import model_135m
from bench.report import ROOT
from tandem.controlplane.simulator.calibration import of_sim_engine
from tandem.core.config import SimSection, WorkerSection
from tandem.engine.model_config import read_model_config
from tandem.engine.pool_plan import kv_layout
from tandem.worker.sim_loading import LAYER_GROUPS

BUNDLED = ROOT / "models" / "tandem-tiny"
SIM = WorkerSection(
    engine="sim", sim=SimSection(prefill_tokens_per_s=800.0, decode_step_s=0.02, decode_sequence_s=0.001)
)  # fmt: skip
_TRANSPORT = "shm"
_FIRST_TOKEN, _LAST_TOKEN = 300, 4000
"""Ids that are text in the bundled model's vocabulary."""
_WHOLE = {"400": 100}
"""Random weights give tokens that are no whole characters, which a client would get late: all give this one."""


class EngineKind(StrEnum):
    """`MODEL`: the 135M shape with random weights on the CPU, a thread a worker. `SIM`: steps by arithmetic."""

    MODEL = "model"
    SIM = "sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine. `limit`: allowed error of a prediction. `worker` matters to sim engines only."""

    kind: EngineKind
    limit: float
    worker: WorkerSection = SIM

    def flags(self, folder: Path) -> list[str]:
        """Flags of `clusterctl up`; settings go to a file in `folder`."""
        if self.kind is EngineKind.MODEL:
            return ["--model", str(model_135m()), "--threads", "1"]
        config, sim = folder / "cluster.toml", self.worker.sim
        config.write_text(
            f'[worker]\nengine = "sim"\n[worker.sim]\nprefill_tokens_per_s = {sim.prefill_tokens_per_s}\n'
            f"decode_step_s = {sim.decode_step_s}\ndecode_sequence_s = {sim.decode_sequence_s}\n"
        )
        return ["--config", str(config)]

    def measured(self) -> dict[str, Any]:
        """Input of `calibration.from_record`: steps of the engine by itself, and moves of KV, as `bench/engine`
        measures them; for a sim engine the settings give the times of its steps."""
        if self.kind is EngineKind.MODEL:
            return measured(model_135m(), transport=_TRANSPORT)
        model, worker = read_model_config(BUNDLED), self.worker
        layout = kv_layout(model, dtype=model.dtype, block_tokens=worker.block_tokens, tp=1)
        by_settings = of_sim_engine(worker, kv_token_bytes=layout.token_bytes(), link_bytes_per_s=1e9, rpc_s=0.0)
        return {**dataclasses.asdict(by_settings), "layer_groups": LAYER_GROUPS, "kv_moves": moves(_TRANSPORT)}

    def body(self, number: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        """A request; every number has a prompt of its own."""
        dice = random.Random(f"request {number}")
        prompt = [dice.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(prompt_tokens)]
        if self.kind is EngineKind.MODEL:
            return body_of(prompt, output_tokens, model_135m().name, logit_bias=_WHOLE)
        return body_of(prompt, output_tokens)


ENGINES = {
    EngineKind.MODEL: Engine(kind=EngineKind.MODEL, limit=0.15),
    EngineKind.SIM: Engine(kind=EngineKind.SIM, limit=0.10),
}
