"""Assembles a rank: rank 0 with engine, transfer ends and shell, a follower with its part of each."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.core import metric_names as names
from tandem.core.clock import MonotonicClock
from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.cpu_level import cpu_level, product_words
from tandem.core.ids import Rank, WorkerId
from tandem.core.kv_layout import KVLayout
from tandem.core.lease_timing import TOMBSTONE_S
from tandem.core.start_times import StartPhase
from tandem.core.timeout_scale import patient
from tandem.core.version import STREAM_VERSION
from tandem.engine.pool_plan import kv_words
from tandem.kernels.build_lock import WATCH
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.kvtransfer.wire import profile_to_wire
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.worker.follower import Follower, Reporter
from tandem.worker.followers import Followers, LeaderRunner
from tandem.worker.group_transfers import GroupReceiver, GroupSender
from tandem.worker.pool_backing import PoolBacking
from tandem.worker.reports import Hello
from tandem.workercore.heartbeat import Pulse
from tandem.workercore.inbox import Inbox
from tandem.workercore.message_ring import RingPair, RingReader, RingWriter
from tandem.workercore.outbox import Outbox
from tandem.workercore.requests import RequestTable
from tandem.workercore.role_interface import RoleContext
from tandem.workercore.transfer_interfaces import ReceivingEnd, SendingEnd

FOLLOWERS_TIMEOUT_S = patient(120.0)
"""Time from the end of loading, which all ranks reach together, to the hello of the last of them."""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The rank that this process is, and its rings. `pairs`: rank 0 has one a follower, a follower has its own."""

    rank: Rank
    pairs: tuple[RingPair, ...]
    rendezvous: Path


class StartSteps:
    """`say` gets phases in order, one at a time. A compiler that runs in a phase is one of its own, between two parts
    of it. Thread-safe."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._phase: StartPhase | None = None

    def enter(self, phase: StartPhase) -> None:
        """Begin this phase and end the one before."""
        with self._lock:
            self._phase = phase
            self._say(phase)

    def note(self, text: str) -> None:
        """Report another text; the phase goes on."""
        with self._lock:
            self._say(text)

    def compile(self, is_begun: bool) -> None:
        """Report that a compiler begins; or that it has ended, and the phase goes on."""
        with self._lock:
            phase = StartPhase.COMPILING if is_begun else self._phase
            if phase is not None:
                self._say(phase)


@dataclass(slots=True)
class Leader:
    """Parts that rank 0 runs. `followers` is None in a worker of one rank."""

    context: RoleContext
    info: w.WorkerInfo
    followers: Followers | None

    def close(self) -> None:
        """End the transfers, then the other ranks, and the threads of grammars."""
        self.context.sender.close()
        self.context.receiver.close()
        if self.followers is not None:
            self.followers.close()
        if self.context.engine.grammars is not None:
            self.context.engine.grammars.close()


def assemble_leader(config: WorkerConfig, seat: RankIdentity, inbox: Inbox, outbox: Outbox) -> Leader:
    """Load the model, build engine and transfer ends, warm up. Raises TandemError with the remedy."""
    steps = StartSteps(lambda text: outbox.put(e.RankToHost(progress=e.Progress(text=text))))
    with WATCH.told(steps.compile):
        return _assemble_leader(config, seat, inbox, outbox, steps)


def _assemble_leader(
    config: WorkerConfig, seat: RankIdentity, inbox: Inbox, outbox: Outbox, steps: StartSteps
) -> Leader:
    enter = steps.enter
    if config.settings.engine == "model":
        enter(StartPhase.TORCH)
        import tandem.worker.model_loading  # noqa: F401 - now, so that its time is not that of the weights
    from tandem.kvtransfer.host_id import host_id
    from tandem.worker import engine_loading

    followers = group = None
    if seat.pairs:
        followers = Followers(seat.pairs, inbox.post)
        followers.start()
        enter(StartPhase.GROUP)
        group = engine_loading.join_group(config, seat.rank, seat.rendezvous)
    enter(StartPhase.WEIGHTS)
    loaded_rank = engine_loading.load_rank(config, group, enter)
    if loaded_rank.memory is not None:
        steps.note(loaded_rank.memory.words())
        if not engine_loading.is_on_device(loaded_rank.pools):
            dtype, weights = loaded_rank.fingerprint.compute_dtype, loaded_rank.fingerprint.weight_quantisation
            about = dtype if weights == "none" else f"{dtype}, weights in {weights}"
            steps.note(f"computes in {about}; matrix products: {product_words(cpu_level(), dtype)}")
    runner = loaded_rank.runner
    steps.note(kv_words(runner.layout, runner.num_blocks, runner.max_model_len))
    if followers is not None:
        followers.wait_ready(FOLLOWERS_TIMEOUT_S)
        runner = LeaderRunner(runner, followers)
    loaded = engine_loading.Loaded(
        engine_loading.engine_over(runner, config, loaded_rank.swap), loaded_rank.pools, loaded_rank.fingerprint
    )
    enter(StartPhase.WARM_UP)
    loaded.warm_up()
    enter(StartPhase.TRANSFERS)
    speeds = LinkSpeeds(MonotonicClock())
    receiver: ReceivingEnd
    sender: SendingEnd
    if followers is None:
        receiver, sender = engine_loading.open_transfer_ends(config, loaded, inbox.post, speeds=speeds)
    else:
        open_receiver = functools.partial(engine_loading.open_receiver, config, loaded.pools, seat.rank)
        open_sender = functools.partial(engine_loading.open_sender, config, loaded.pools, seat.rank, speeds=speeds)
        receiver = GroupReceiver(open_receiver, followers, inbox.post)
        sender = GroupSender(open_sender, followers, inbox.post, MonotonicClock())
    context = RoleContext(
        worker=WorkerId(config.worker_id),
        incarnation=engine_loading.NOT_REGISTERED,
        profile=engine_loading.kv_profile(loaded, receiver, config.settings, config.revision),
        host=host_id(),
        engine=loaded.engine,
        receiver=receiver,
        sender=sender,
        requests=RequestTable(TOMBSTONE_S),
        outbox=outbox,
        clock=MonotonicClock(),
        speeds=speeds,
        work=loaded_rank.work,
        peaks=_peaks(config.settings) if loaded_rank.work is not None else {},
    )
    PoolBacking(loaded_rank.unbacked, context.engine.batch_counts).start()
    return Leader(context, _info(config, context), followers)


def assemble_follower(config: WorkerConfig, seat: RankIdentity, pulse: Pulse) -> Follower:
    """Load this rank's part, open its transfer ends, and send hello to rank 0. Raises TandemError."""
    from tandem.worker import engine_loading

    (pair,) = seat.pairs
    reporter = Reporter(RingWriter(pair.reports))
    group = engine_loading.join_group(config, seat.rank, seat.rendezvous)
    loaded = engine_loading.load_rank(config, group)
    speeds = LinkSpeeds(MonotonicClock())  # its own: only rank 0's are reported to others
    receiver, sender = engine_loading.open_transfer_ends(config, loaded, reporter.say, seat.rank, speeds=speeds)
    reporter.say(Hello(receiver.endpoints()))
    follower = Follower(loaded.runner, receiver, sender, RingReader(pair.commands), reporter, pulse, MonotonicClock())
    PoolBacking(loaded.unbacked, follower.batch_counts).start()
    return follower


def _peaks(settings: WorkerSection) -> dict[str, float]:
    """Of all ranks, as far as configured."""
    said = {names.PEAK_FLOPS: settings.peak_flops_per_s, names.PEAK_BYTES: settings.peak_bytes_per_s}
    return {names.counter_key(name): settings.tp * peak for name, peak in said.items() if peak}


def _info(config: WorkerConfig, context: RoleContext) -> w.WorkerInfo:
    engine, first = context.engine, context.engine.layout.groups[0]
    return w.WorkerInfo(
        worker=config.worker_id,
        role=config.role.value,
        model=config.model,
        fingerprint=context.fingerprint,
        tp=engine.layout.tp,
        block_tokens=first.block_tokens,
        kv_dtype=first.dtype,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        num_blocks=[ledger.num_blocks for ledger in engine.ledgers],
        token_kv_bytes=KVLayout(groups=engine.layout.groups).token_bytes(),  # bytes that a transfer moves, for any TP
        transports=context.profile.transports,
        protocol=STREAM_VERSION,
        eos_token_ids=engine.eos_token_ids,
        pid=os.getppid(),
        profile=profile_to_wire(context.profile),
        host=context.host,
    )
