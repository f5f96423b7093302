"""Durations and capacities of the simulator, from a machine's measurements."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.controlplane.simulator.fit_measurements import fitted
from tandem.core.config import SIM_KV_BYTES, WorkerSection
from tandem.core.errors import ConfigError
from tandem.core.ids import GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.engine.step_budget import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One kind of worker and its links. Defaults: Llama-3-8B shapes in bfloat16 on one H100 (docs/simulator.md).

    A chunk of n prompt tokens behind c others takes `prefill_token_s`·n + `prefill_context_s`·n·(c + n/2) seconds, and
    a step with any chunk `prefill_step_s` besides. A step that decodes b sequences with c tokens of context in all
    takes `decode_step_s` + `decode_sequence_s`·b + `decode_context_s`·c. A step that does both takes the sum, less
    `shared_step_s`: the weights are read once. `rpc_s` is one way between two processes,
    `link_bytes_per_s` what one worker can send and what one can receive, `layer_groups` in how many parts a chunk's
    KV leaves while it is computed, `kv_tokens` what one worker's pool holds.
    """

    name: str = "Llama-3-8B shapes, bfloat16, one H100 SXM a worker, 200 Gbit/s links: by arithmetic, not measured"
    prefill_step_s: float = 0.004
    prefill_token_s: float = 40e-6
    prefill_context_s: float = 1.5e-9
    decode_step_s: float = 0.0065
    decode_sequence_s: float = 30e-6
    decode_context_s: float = 52e-9
    shared_step_s: float = 0.0
    kv_token_bytes: int = 131_072
    kv_tokens: int = 393_216
    block_tokens: int = 512
    link_bytes_per_s: float = 20e9
    layer_groups: int = 8
    rpc_s: float = 0.0005
    max_step_tokens: int = 4096
    chunk_tokens: int = 4096
    max_step_s: float = 0.2
    max_sequences: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and value < 0:
                raise ConfigError(f"{field.name} is {value}", why="it must not be negative")
        for name in ("kv_token_bytes", "kv_tokens", "block_tokens", "link_bytes_per_s", "layer_groups"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is 0", why="it must be above 0")
        if self.shared_step_s > self.prefill_step_s + self.decode_step_s:
            raise ConfigError(
                f"shared_step_s is {self.shared_step_s}",
                why="a step that does both cannot save more than prefill_step_s and decode_step_s",
            )

    @property
    def blocks(self) -> int:
        """Number of blocks of one worker's pool."""
        return self.kv_tokens // self.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.kv_token_bytes * self.block_tokens

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_step_tokens=self.max_step_tokens,
            max_step_s=self.max_step_s,
            max_sequences=self.max_sequences,
            chunk_tokens=self.chunk_tokens,
        )

    def layout(self) -> KVLayout:
        """One KV group of one layer with as many bytes a token as the whole model has."""
        width = max(1, self.kv_token_bytes // 2)
        group = KVGroupSpec(
            group=GroupId(0), layers=(0,), planes=1, heads=1, width=width,
            block_tokens=self.block_tokens, dtype="bfloat16",
        )  # fmt: skip
        return KVLayout(groups=(group,))

    def chunk_s(self, start: int, end: int) -> float:
        """Return seconds for the prompt tokens [start, end) of one request, without `prefill_step_s`."""
        tokens = end - start
        return tokens * (self.prefill_token_s + self.prefill_context_s * (start + tokens / 2))

    def decode_s(self, sequences: int, context_tokens: float) -> float:
        """Return seconds for one token of each of `sequences` sequences with `context_tokens` tokens in all."""
        return self.decode_step_s + self.decode_sequence_s * sequences + self.decode_context_s * context_tokens

    def step_s(self, chunks: Sequence[tuple[int, int]], sequences: int, context_tokens: float) -> float:
        """Return seconds of a whole step: `chunks` of prompts, each [start, end), and one token for each of
        `sequences`."""
        chunks_s = self.prefill_step_s + sum(self.chunk_s(*chunk) for chunk in chunks) if chunks else 0.0
        decode_s = self.decode_s(sequences, context_tokens) if sequences else 0.0
        return chunks_s + decode_s - (self.shared_step_s if chunks and sequences else 0.0)


def of_sim_engine(worker: WorkerSection, *, kv_token_bytes: int, link_bytes_per_s: float, rpc_s: float) -> Calibration:
    """Return the values of `[worker]` and `[worker.sim]`, so that a real cluster of sim engines can confirm the
    simulator.

    `kv_token_bytes` and `link_bytes_per_s` are those of the cluster (`clusterctl net` has measured the second).
    """
    sim = worker.sim
    return Calibration(
        name="the sim engine's [worker.sim] settings",
        prefill_step_s=sim.prefill_step_s,
        prefill_token_s=1 / sim.prefill_tokens_per_s if sim.prefill_tokens_per_s else 0.0,
        prefill_context_s=sim.prefill_context_s,
        decode_step_s=sim.decode_step_s,
        decode_sequence_s=sim.decode_sequence_s,
        decode_context_s=sim.decode_context_s,
        kv_token_bytes=kv_token_bytes,
        kv_tokens=(worker.kv_memory_bytes or SIM_KV_BYTES)
        // (kv_token_bytes * worker.block_tokens)
        * worker.block_tokens,
        block_tokens=worker.block_tokens,
        link_bytes_per_s=link_bytes_per_s,
        rpc_s=rpc_s,
        max_step_tokens=worker.max_step_tokens,
        chunk_tokens=worker.chunk_tokens,
        max_step_s=worker.max_step_s,
        max_sequences=worker.max_sequences,
    )


def read(path: Path) -> Calibration:
    """Read a bench file: JSON with any of Calibration's fields, and the measurements that some of them are fitted to.

    `prefill_steps`, `decode_steps`, `mixed_steps`, `kv_moves`: rows as `measured.fitted` takes them, in place of the
    fields that they give; `prefill_tokens_per_s` in place of `prefill_*`. All of that may stand under `calibration`, as
    in the output of `make bench NAME=engine`. Raises ConfigError that describes the mistake.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the calibration {path} cannot be read", why=str(error)) from error
    if not isinstance(record, dict):
        raise ConfigError(f"the calibration {path} is not an object", why="it must be a JSON object of settings")
    inner = record.get("calibration", record)
    if not isinstance(inner, dict):
        raise ConfigError(
            f"the calibration {path} is not an object", why="`calibration` must be a JSON object of settings"
        )
    return from_record({"name": path.stem, **inner})


def from_record(record: Mapping[str, Any]) -> Calibration:
    """Convert the content of a bench file (see `read`). Raises ConfigError that describes the mistake."""
    try:
        return _made(dict(record))
    except KeyError as error:
        raise ConfigError("the calibration has a row that lacks a key", why=f"there is no {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError("the calibration has a value that is not a number", why=str(error)) from error


def _made(values: dict[str, Any]) -> Calibration:
    rate = values.pop("prefill_tokens_per_s", None)
    if rate is not None and "prefill_steps" not in values:
        if not float(rate) > 0:
            raise ConfigError(f"prefill_tokens_per_s is {rate}", why="it must be above 0")
        values |= {"prefill_step_s": 0.0, "prefill_token_s": 1 / float(rate), "prefill_context_s": 0.0}
    usual = {field.name: field.default for field in dataclasses.fields(Calibration)}
    values = fitted(values, usual)
    if unknown := sorted(set(values) - set(usual)):
        raise ConfigError(
            f"the calibration has an unknown key {unknown[0]}", why=f"known are {', '.join(sorted(usual))}"
        )
    return Calibration(**values)
