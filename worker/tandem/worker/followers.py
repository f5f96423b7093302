"""Rank 0's side of the other ranks: commands go out in one order, reports come in on a thread of their own.

Its runner passes every step and copy to the followers first, then runs it here.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable, Sequence

from tandem.core.errors import StartupError, WorkerLostError
from tandem.core.ids import Rank
from tandem.core.link_speed import ReportedLink
from tandem.core.timeout_scale import patient
from tandem.engine.request import TokenOutput
from tandem.engine.runner_protocol import Ahead, Runner, SampleRow, StepBatch
from tandem.kvtransfer.ticket import Endpoint
from tandem.worker.commands import AFTER_STEP, Command, CopyBlocks, Step, Stop, encode, split
from tandem.worker.reports import Counters, Hello, Links, Report, decode
from tandem.workercore.message_ring import RingPair, RingReader, RingWriter

_log = logging.getLogger(__name__)
COMMAND_TIMEOUT_S = patient(10.0)
"""A follower that leaves a full ring unread for this long is lost; its host has noticed long before."""
OnReport = Callable[[Rank, Report], None]


class Followers:
    """All ranks but this one. Reports go to those that `listen`.

    `broadcast` waits for followers that are behind: it is for the step loop. Callers that must not wait, as a follower
    may wait for them, use `broadcast_soon`. `on_lost` is called from a thread of this object that cannot go on.
    """

    def __init__(self, pairs: Sequence[RingPair], on_lost: Callable[[Exception], None]) -> None:
        """`pairs` are those of ranks 1, 2, …"""
        self.stored_layers = AFTER_STEP
        """Layers that this rank has stored of the step in progress; goes out with every command."""
        self.is_in_step = False
        self._writers = [RingWriter(pair.commands) for pair in pairs]
        self._readers = [RingReader(pair.reports) for pair in pairs]
        self._on_lost = on_lost
        self._lock = threading.Lock()  # guards the writers
        self._lost: WorkerLostError | None = None
        self._listeners: list[OnReport] = []
        self._news = threading.Condition()  # guards the three below
        self._endpoints: dict[Rank, tuple[Endpoint, ...]] = {}
        self._counters: dict[Rank, dict[str, int]] = {}
        self._links: dict[Rank, tuple[ReportedLink, ...]] = {}
        self._stop = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._read, name="followers", daemon=True)
        self._soon: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._speaker = threading.Thread(target=self._speak, name="to-followers", daemon=True)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(place + 1) for place in range(len(self._writers)))

    def listen(self, on_report: OnReport) -> None:
        """Register for every report from now on but hellos, counters and links, on the reading thread."""
        self._listeners.append(on_report)

    def start(self) -> None:
        self._thread.start()
        self._speaker.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every follower has sent hello. Raises StartupError."""
        with self._news:
            if not self._news.wait_for(lambda: len(self._endpoints) == len(self._writers), timeout_s):
                missing = ", ".join(str(rank) for rank in self.ranks if rank not in self._endpoints)
                raise StartupError(f"rank {missing} was not ready within {timeout_s:g} s", todo="see its log")

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Endpoints of all followers, in rank order."""
        with self._news:
            return tuple(endpoint for rank in self.ranks for endpoint in self._endpoints.get(rank, ()))

    def counters(self) -> list[dict[str, int]]:
        """The latest counters of every follower that has reported any."""
        with self._news:
            return list(self._counters.values())

    def links(self) -> tuple[ReportedLink, ...]:
        """The latest links of every follower that has reported any, in rank order."""
        with self._news:
            return tuple(link for rank in self.ranks for link in self._links.get(rank, ()))

    def broadcast(self, command: Command) -> None:
        """Give a command to every follower, behind all commands before it. Raises WorkerLostError."""
        data = encode(command, self.stored_layers)
        with self._lock:
            if self._lost is not None:
                raise self._lost
            for rank, writer in zip(self.ranks, self._writers, strict=True):
                try:
                    for message in split(data, writer.max_message_bytes):
                        writer.write(message, COMMAND_TIMEOUT_S)
                except TimeoutError as error:
                    self._lost = WorkerLostError(f"rank {rank} does not read its commands", why=str(error))
                    raise self._lost from error

    def broadcast_soon(self, command: Command) -> None:
        """The same from any thread and without waiting, somewhere among the commands of others."""
        self._soon.put(command)

    def close(self) -> None:
        """Send the followers a stop, and stop reading. The rings stay the host's."""
        try:
            self._soon.put(None)
            self._speaker.join()
            self.broadcast(Stop())
        finally:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            for end in (*self._writers, *self._readers):
                end.close()
            os.close(self._stop)

    def _speak(self) -> None:
        try:
            while (command := self._soon.get()) is not None:
                self.broadcast(command)
        except Exception as error:  # noqa: BLE001 - whatever it was, the followers get no more commands
            self._on_lost(error)

    def _read(self) -> None:
        by_descriptor = {reader.filled: (Rank(place + 1), reader) for place, reader in enumerate(self._readers)}
        try:
            while True:
                ready, _, _ = select.select([*by_descriptor, self._stop], [], [])
                if self._stop in ready:
                    return
                for descriptor in ready:
                    rank, reader = by_descriptor[descriptor]
                    for data in reader.read_all():
                        self._take(rank, decode(data))
        except Exception as error:  # noqa: BLE001 - whatever it was, no report comes through any more
            self._on_lost(error)

    def _take(self, rank: Rank, report: Report) -> None:
        if isinstance(report, Hello | Counters | Links):
            with self._news:
                if isinstance(report, Hello):
                    self._endpoints[rank] = report.endpoints
                elif isinstance(report, Links):
                    self._links[rank] = report.links
                else:
                    self._counters[rank] = report.values
                self._news.notify_all()
            return
        for listener in self._listeners:
            listener(rank, report)


class LeaderRunner:
    """A `Runner` over a whole group. Only this rank samples.

    A step that fails raises WorkerLostError: some ranks may be inside a collective that others have left, so no
    further step can be trusted, and the worker ends.
    """

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner, self._followers = runner, followers
        self.layout, self.max_model_len, self.num_blocks = runner.layout, runner.max_model_len, runner.num_blocks
        self.vocab_size, self.eos_token_ids = runner.vocab_size, runner.eos_token_ids

    @property
    def ahead(self) -> Ahead | None:
        """None: followers get a step's tokens only with the next step."""
        return None

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: Callable[[int, int], None] | None = None
    ) -> list[TokenOutput]:
        followers = self._followers
        followers.broadcast(Step(batch, has_hook=on_layers is not None))

        def stored(first: int, last: int) -> None:
            followers.stored_layers = last
            if on_layers is not None:
                on_layers(first, last)

        followers.is_in_step, followers.stored_layers = True, 0
        try:
            return self._runner.step(batch, rows, stored if on_layers is not None else None)
        except WorkerLostError:
            raise
        except Exception as error:
            _log.exception("a step of the group failed")
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise WorkerLostError("a step of the tensor-parallel group failed on rank 0", why=what) from error
        finally:
            followers.is_in_step, followers.stored_layers = False, AFTER_STEP

    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        self._followers.broadcast(CopyBlocks(group, pairs))
        self._runner.copy_blocks(group, pairs)
