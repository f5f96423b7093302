"""From a configuration to a loaded engine and open transfer ends. Imports torch; only rank processes come here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.core.blockhash import HashRoot
from tandem.core.clock import MonotonicClock
from tandem.core.config import WorkerConfig
from tandem.core.errors import ConfigError
from tandem.core.ids import GroupId, Incarnation, Rank, WorkerId
from tandem.core.kvlayout import KVGroupSpec
from tandem.core.sampling import SamplingParams
from tandem.core.secret import ClusterSecret
from tandem.engine.engine import Engine
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import ModelSource, fingerprint
from tandem.engine.pace import SchedulerConfig
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.kvtransfer.frame import MAX_PAYLOAD_BYTES
from tandem.kvtransfer.pool import HostPool, PoolAccess
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.transports.dialling import Preference
from tandem.worker.device_pool import DevicePool

NOT_REGISTERED = Incarnation(0)
"""Until the host has registered the worker; no ticket carries it."""
LAYER_GROUPS = 4
"""Pieces in which a chunk's KV leaves while the rest is computed, unless `layer_group` says otherwise."""
_PREFERENCES: dict[str, Preference] = {"auto": "auto", "shm": "shm", "grpc": "grpc"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run on this rank, its pools as bytes, and its fingerprint."""

    engine: Engine
    pools: dict[GroupId, PoolAccess]
    fingerprint: str

    def warm_up(self) -> None:
        """Run one short request, so that the first user does not wait for lazy initialisation. Leaves no trace."""
        root = HashRoot(fingerprint="warm-up", block_tokens=1).digest()
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        self.engine.add(EngineRequest(key="warm-up", prompt=(0, 1, 2), sampling=sampling, hash_root=root))
        while self.engine.has_work:
            self.engine.step()
        for ledger in self.engine.ledgers:
            ledger.evict_cached()
        self.engine.take_block_events()


def load_engine(config: WorkerConfig) -> Loaded:
    """Load the model onto the configured device. Raises ModelError, ConfigError or StartupError."""
    settings = config.settings
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = Path(config.model_dir)
    layers = read_model_config(folder).layers
    runner = ModelRunner(
        model_dir=folder,
        dtype=config.dtype,
        device=device,
        block_tokens=settings.block_tokens,
        kv_bytes=settings.kv_memory_bytes,
        max_model_len=config.max_model_len,
        is_deterministic=settings.is_deterministic,
        layer_group=settings.layer_group or -(-layers // LAYER_GROUPS),
    )
    scheduling = SchedulerConfig(
        max_step_tokens=settings.max_step_tokens,
        max_step_s=settings.max_step_s,
        max_sequences=settings.max_sequences,
        chunk_tokens=settings.chunk_tokens,
    )
    for spec in runner.layout.groups:
        _check_frames(spec)
    source = ModelSource(name=config.model, path=folder, commit=config.revision)
    return Loaded(
        engine=Engine(runner, config=scheduling, clock=MonotonicClock()),
        pools=_pools(runner, device),
        fingerprint=fingerprint(source, runner.config, compute_dtype=runner.dtype).digest(),
    )


def open_transfer_ends(
    config: WorkerConfig, loaded: Loaded, post: Callable[[object], None]
) -> tuple[TransferReceiver, TransferSender]:
    """Both ends of this rank, listening; `post` gets their events from transport threads. The caller closes both."""
    if config.settings.transport not in _PREFERENCES:
        known = ", ".join(_PREFERENCES)
        raise ConfigError(f"unknown KV transport {config.settings.transport!r}", todo=f"use one of {known}")
    secret, worker = ClusterSecret.load(Path(config.secret_file)), WorkerId(config.worker_id)
    receiver = TransferReceiver(
        worker=worker,
        incarnation=NOT_REGISTERED,
        rank=Rank(0),
        pools=loaded.pools,
        secret=secret,
        runtime_dir=Path(config.runtime_dir),
        on_event=post,
        clock=MonotonicClock(),
        bind_host=config.host,
    )
    receiver.start()
    sender = TransferSender(
        worker=worker,
        incarnation=NOT_REGISTERED,
        rank=Rank(0),
        pools=loaded.pools,
        secret=secret,
        on_event=post,
        clock=MonotonicClock(),
        preference=_PREFERENCES[config.settings.transport],
    )
    return receiver, sender


def _check_frames(spec: KVGroupSpec) -> None:
    """ConfigError when not even one head of one layer of a block fits a frame: no such block could ever travel."""
    row = spec.planes * spec.head_bytes()
    if row > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"--block-tokens {spec.block_tokens} is too large",
            why=f"one head of a block has {row} bytes, and KV travels in frames of {MAX_PAYLOAD_BYTES}",
            todo=f"use {spec.block_tokens * MAX_PAYLOAD_BYTES // row} or less",
        )


def _pools(runner: ModelRunner, device: str) -> dict[GroupId, PoolAccess]:
    pools: dict[GroupId, PoolAccess] = {}
    for spec in runner.layout.groups:
        if device == "cpu":
            pools[spec.group] = HostPool(spec, runner.layout.tp, runner.pool_bytes(spec.group))
        else:
            pools[spec.group] = DevicePool(spec, runner.layout.tp, runner.pools.tensors[spec.group])
    return pools
