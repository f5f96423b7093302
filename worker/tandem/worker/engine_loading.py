"""Loads an engine and opens transfer ends from a configuration, for rank processes.

Imports no torch: `model_loading` does, once a model is to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.core.block_hash import HashRoot
from tandem.core.clock import MonotonicClock
from tandem.core.config import ENGINES, WorkerConfig, WorkerSection
from tandem.core.errors import ConfigError, StartupError
from tandem.core.gguf.model_files import is_gguf
from tandem.core.ids import GroupId, Incarnation, Rank, WorkerId
from tandem.core.kv_compatibility import Fingerprint, KVProfile
from tandem.core.kv_layout import KVGroupSpec
from tandem.core.prefill_queue import QueueRules
from tandem.core.sampling import SamplingParams
from tandem.core.secret import ClusterSecret
from tandem.core.start_times import StartPhase
from tandem.engine.engine import Engine
from tandem.engine.memory_plan import MemoryPlan
from tandem.engine.model_work import ModelWork, model_work
from tandem.engine.output_grammars import OutputGrammars, load_tokenizer
from tandem.engine.request import EngineRequest
from tandem.engine.runner_protocol import Runner
from tandem.engine.step_budget import SchedulerConfig
from tandem.engine.swapping import Swap
from tandem.kvtransfer.events import ReceiverEvent, SenderEvent
from tandem.kvtransfer.frame import MAX_PAYLOAD_BYTES
from tandem.kvtransfer.kv_pool_access import HostPool, PoolAccess
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.transports.registry import check_preference
from tandem.workercore.transfer_interfaces import ReceivingEnd

if TYPE_CHECKING:
    from tandem.engine.parallel import TensorGroup

NOT_REGISTERED = Incarnation(0)
"""Placeholder until the host has registered the worker; no ticket carries it."""
RANK_0 = Rank(0)
Pools = Mapping[GroupId, PoolAccess]


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """One rank's part of a model, its pools as bytes, and the model's fingerprint. `work`: cost of computing the whole
    model, `memory`: memory of this rank; None = none is computed. `swap`: None = preempted KV is not kept. `unbacked`:
    pools of which no byte takes memory yet."""

    runner: Runner
    pools: dict[GroupId, PoolAccess]
    fingerprint: Fingerprint
    work: ModelWork | None = None
    memory: MemoryPlan | None = None
    swap: Swap | None = None
    unbacked: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run: the engine over all ranks, this rank's pools as bytes, and the model's fingerprint."""

    engine: Engine
    pools: dict[GroupId, PoolAccess]
    fingerprint: Fingerprint

    def warm_up(self) -> None:
        """Run one short request, so that the first user does not wait for lazy initialisation. Leaves no trace, nor
        does it count in the measured pace. Raises StartupError if it fails: a worker that cannot compute is not
        ready."""
        root = HashRoot(fingerprint="warm-up", block_tokens=1).digest()
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        self.engine.add(EngineRequest(key="warm-up", prompt=(0, 1, 2), sampling=sampling, hash_root=root))
        while self.engine.has_work:
            for error in self.engine.step().failed.values():
                raise StartupError("the model cannot run here", why=str(error), todo="see its log") from error
        for ledger in self.engine.ledgers:
            ledger.evict_cached()
        self.engine.blocks.take_events()
        self.engine.pace.forget()


def join_group(config: WorkerConfig, rank: int, rendezvous: Path) -> TensorGroup:
    """Meet the other ranks of this worker. Raises ConfigError or StartupError."""
    from tandem.engine.parallel import open_group

    device = "cpu"
    if config.settings.engine == "model":
        from tandem.worker.model_loading import rank_device

        device = rank_device(config, rank)
    settings = config.settings
    return open_group(rank, settings.tp, device=device, rendezvous=rendezvous, timeout_s=settings.step_watchdog_s)


def load_rank(
    config: WorkerConfig, group: TensorGroup | None = None, enter: Callable[[StartPhase], None] = lambda _: None
) -> LoadedRank:
    """Load this rank's part of the model; `enter` gets each phase. Raises ModelError, ConfigError, StartupError, or
    WorkerLostError if another rank of the group fails."""
    if config.settings.engine not in ENGINES:
        raise ConfigError(f"unknown engine {config.settings.engine!r}", todo=f"use one of {', '.join(ENGINES)}")
    runner: Runner
    work = memory = swap = None
    unbacked: tuple[memoryview, ...] = ()
    if config.settings.engine == "sim":
        from tandem.worker.sim_loading import load_sim

        runner, pools, identity = load_sim(config, group, enter)
    else:
        from tandem.worker.model_loading import load_model, open_swap

        model, pools, identity = load_model(config, group, enter)
        runner, memory, swap = model, model.memory, open_swap(config, model)
        work = model_work(model.config, dtype=model.dtype, layout=model.layout, quantize=model.quantize)
        if model.device.type == "cpu":
            unbacked = tuple(model.pool_bytes(spec.group) for spec in model.layout.groups)
    for spec in runner.layout.groups:
        _check_frames(spec)
    return LoadedRank(runner, pools, identity, work, memory, swap, unbacked)


def load_engine(config: WorkerConfig) -> Loaded:
    """Load the model for a worker of one rank. Raises what `load_rank` raises."""
    loaded = load_rank(config)
    return Loaded(engine_over(loaded.runner, config, loaded.swap), loaded.pools, loaded.fingerprint)


def engine_over(runner: Runner, config: WorkerConfig, swap: Swap | None = None) -> Engine:
    """The scheduler over a runner of one rank or of all."""
    settings = config.settings
    scheduling = SchedulerConfig(
        max_step_tokens=settings.max_step_tokens,
        max_step_s=settings.max_step_s,
        max_sequences=settings.max_sequences,
        chunk_tokens=settings.chunk_tokens,
        speculation=settings.speculation,
        queue=QueueRules(stretch=settings.queue_stretch, max_overtake_s=settings.queue_max_overtake_s),
    )
    return Engine(runner, config=scheduling, clock=MonotonicClock(), swap=swap, grammars=_open_grammars(config, runner))


def _open_grammars(config: WorkerConfig, runner: Runner) -> OutputGrammars | None:
    """Grammars over the model's tokenizer; None where it has none."""
    model = Path(config.model_dir)
    if not is_gguf(model) and not (model / "tokenizer.json").is_file():
        return None
    return OutputGrammars(lambda: load_tokenizer(model, runner.vocab_size, runner.eos_token_ids))


def open_transfer_ends(
    config: WorkerConfig,
    loaded: Loaded | LoadedRank,
    post: Callable[[ReceiverEvent | SenderEvent], None],
    rank: Rank = RANK_0,
    *,
    speeds: LinkSpeeds | None = None,
) -> tuple[TransferReceiver, TransferSender]:
    """Both ends of this rank, listening; `post` gets their events from transport threads. The caller closes both.

    `speeds`: known speeds of links; None = they are not measured.
    """
    receiver = open_receiver(config, loaded.pools, rank, post)
    return receiver, open_sender(config, loaded.pools, rank, post, speeds=speeds)


def open_receiver(
    config: WorkerConfig, pools: Pools, rank: Rank, on_event: Callable[[ReceiverEvent], None]
) -> TransferReceiver:
    """This rank's receiving end, listening. The caller closes it."""
    receiver = TransferReceiver(
        incarnation=NOT_REGISTERED,
        rank=rank,
        pools=pools,
        secret=ClusterSecret.load(Path(config.secret_file)),
        runtime_dir=Path(config.runtime_dir),
        on_event=on_event,
        clock=MonotonicClock(),
        bind_host=config.host,
        transports=config.settings.transports,
        on_device=is_on_device(pools),
    )
    receiver.start()
    return receiver


def open_sender(
    config: WorkerConfig,
    pools: Pools,
    rank: Rank,
    on_event: Callable[[SenderEvent], None],
    *,
    speeds: LinkSpeeds | None = None,
) -> TransferSender:
    """This rank's sending end. The caller closes it."""
    return TransferSender(
        worker=WorkerId(config.worker_id),
        incarnation=NOT_REGISTERED,
        rank=rank,
        pools=pools,
        secret=ClusterSecret.load(Path(config.secret_file)),
        on_event=on_event,
        clock=MonotonicClock(),
        preference=check_preference(config.settings.transport),
        on_device=is_on_device(pools),
        speeds=speeds,
    )


def is_on_device(pools: Pools) -> bool:
    """True if KV is in a device's memory."""
    return any(not isinstance(pool, HostPool) for pool in pools.values())


def kv_profile(loaded: Loaded, receiver: ReceivingEnd, settings: WorkerSection, revision: str = "") -> KVProfile:
    """Properties of this worker's KV that other workers must know before they exchange any."""
    return KVProfile(
        fingerprint=loaded.fingerprint.digest(),
        identity=tuple(sorted(asdict(loaded.fingerprint).items())),
        layout=loaded.engine.layout,
        revision=revision,
        transports=tuple(sorted({endpoint.transport for endpoint in receiver.endpoints()})),
        offers=(settings.wire_codec,) if settings.wire_codec else (),
        offers_below_bytes_per_s=settings.wire_codec_below_bytes_per_s if settings.wire_codec else 0.0,
    )


def _check_frames(spec: KVGroupSpec) -> None:
    """ConfigError when not even one head of one layer of a block fits a frame: no such block could ever travel."""
    row = spec.planes * spec.head_bytes()
    if row > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"--block-tokens {spec.block_tokens} is too large",
            why=f"one head of a block has {row} bytes, and KV travels in frames of {MAX_PAYLOAD_BYTES}",
            todo=f"use {spec.block_tokens * MAX_PAYLOAD_BYTES // row} or less",
        )
