"""Table of workers: follows the registry, keeps one link a worker, and gives each worker's state to policies."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis

from tandem.core.ids import Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.link_speed import LinkSpeed, ReportedLink, Route
from tandem.core.logs import event
from tandem.core.state_enums import RoleName
from tandem.router.routing.observed_traffic import prompts
from tandem.router.routing.plan import Candidate, form, pairs, refusal, with_affinity
from tandem.router.workers.connection import LinkFactory, WorkerAddress, WorkerLink
from tandem.router.workers.prefix_lookup import PrefixView, SpeedOf
from tandem.router.workers.proto_convert import ReportedLoad, WorkerFacts
from tandem.statestore.index.registry import RegistryWatcher
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys
from tandem.statestore.records import WorkerRecord

_log = logging.getLogger(__name__)
_RETRY_S = 1.0


class RegisteredAddress(Protocol):
    """The fields that the table reads of a registry record."""

    @property
    def incarnation(self) -> int: ...
    @property
    def address(self) -> str: ...


class WorkerDirectory(Protocol):
    """Registered workers. It alone judges which have left: a missing key or an outage of the registry is no reason."""

    async def run(self, on_change: Callable[[Mapping[WorkerId, RegisteredAddress]], None]) -> None:
        """Call `on_change` with all registered workers, now and whenever they change, until cancelled."""

    def note_beat(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """A sign of life came over the worker's stream."""


class WorkerTable:
    """All links. A worker that drains, or left the registry, keeps its link while the stream lives, but gets no new
    work."""

    def __init__(self, directory: WorkerDirectory, speeds: LinkSpeedView | None = None) -> None:
        self.speeds = speeds or LinkSpeedView()
        self._directory = directory
        self._links: dict[WorkerId, WorkerLink] = {}
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._uses = 0
        self._profiles: dict[KVProfile, KVProfile] = {}
        self._kept: dict[WorkerId, _Kept] = {}
        self.trouble = ""

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def link(self, worker: WorkerId) -> WorkerLink | None:
        return self._links.get(worker)

    def usable(self, model: str = "") -> list[WorkerLink]:
        """Links that new work for `model` may go to; "" = any model."""
        return [
            link
            for link in self._links.values()
            if link.takes_work and link.facts is not None and model in ("", link.facts.model)
        ]

    def candidates(
        self, view: PrefixView | None = None, now_s: float = 0.0, *, model: str = "", cache_key: str = ""
    ) -> list[Candidate]:
        """Workers that can take work for `model` ("" = any) now, as the policy sees them: with the prompt's prefix
        there from `view`, and as requests of `cache_key` see them. `now_s` decides which load reports still count."""
        every = [self._candidate(link, now_s) for link in self.usable(model)]
        if view is not None and view.is_known_somewhere:
            every = [_holding(candidate, view) for candidate in every]
        return with_affinity(cache_key, every)

    def candidate(self, link: WorkerLink, view: PrefixView, now_s: float) -> Candidate:
        """A connected worker, taking work or not, with the prompt's prefix there from `view`."""
        return _holding(self._candidate(link, now_s), view)

    def _candidate(self, link: WorkerLink, now_s: float) -> Candidate:
        """Made anew only when something was reported by the worker, or sent to it: most are as they were."""
        outstanding = link.outstanding
        is_stale, kept = outstanding.is_stale(now_s), self._kept.get(link.worker)
        if (
            kept is None
            or kept.link is not link
            or kept.load is not link.load
            or kept.changes != outstanding.changes
            or kept.candidate.last_used != link.last_used
            or kept.is_stale is not is_stale
            or kept.facts is not link.facts
        ):
            candidate = _candidate(link, self.link_speed, now_s)
            kept = self._kept[link.worker] = _Kept(
                link, link.load, outstanding.changes, is_stale, link.facts, candidate
            )
        return kept.candidate

    def link_speed(self, prefill: WorkerId, decode: WorkerId) -> float | None:
        """Measured bytes a second from one worker to the other; None = not measured."""
        return self.speeds.bytes_per_s(self._links.get(prefill), self._links.get(decode))

    def usual_link_speed(self) -> float:
        """Bytes a second from workers that compute prompts to others that generate: the median; 0 = none was
        measured."""
        every = [(link, link.facts.role) for link in self.links if link.facts is not None]
        senders = [link for link, role in every if role is not RoleName.DECODE]
        return self.speeds.median(senders, [link for link, role in every if role is not RoleName.PREFILL])

    def note_use(self, link: WorkerLink) -> None:
        self._uses += 1
        link.last_used = self._uses

    def note_up(self, link: WorkerLink) -> None:
        """The worker has sent its facts. Equal profiles become one object: plans compare them pair by pair."""
        if link.facts is not None:
            profile = link.facts.profile
            link.facts = dataclasses.replace(link.facts, profile=self._profiles.setdefault(profile, profile))

    def note_beat(self, link: WorkerLink) -> None:
        self._directory.note_beat(link.worker, link.where.incarnation)

    def refused_pairs(self) -> list[tuple[WorkerId, WorkerId, str]]:
        """Every (prefill, decode) pair that is never planned, and why."""
        able = self.candidates()
        decodes = [c for c in able if c.role is RoleName.DECODE]
        every = [(p, d, refusal(p, d)) for p in able if p.role is RoleName.PREFILL for d in decodes]
        return [(p.worker, d.worker, why) for p, d, why in every if why]

    def paired(self) -> list[tuple[WorkerId, WorkerId, str]]:
        """Every (prefill, decode) pair that may be planned, and how blocks get from one to the other."""
        return [(p.worker, d.worker, form(p, d)) for p, d in pairs(self.candidates())]

    def context_tokens(self, model: str = "") -> int:
        """The longest sequence that some usable worker of `model` can hold; 0 = no worker is here."""
        most = dict.fromkeys(RoleName, 0)
        for link in self.usable(model):
            if link.facts is not None:
                most[link.facts.role] = max(most[link.facts.role], link.facts.context_tokens)
        prefill, decode = most[RoleName.PREFILL], most[RoleName.DECODE]
        return max(min(prefill, decode) if prefill and decode else prefill or decode, most[RoleName.MIXED])

    async def run(self, make_link: LinkFactory) -> None:
        """Follow the registry until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    await self._directory.run(lambda here: self._follow(here, make_link, group))
                    self.trouble = "the registry watcher ended"
                except Exception as error:  # noqa: BLE001 - supervises the watcher; links live on without it
                    self.trouble = f"the registry cannot be watched: {error}"
                    event(_log, "registry watcher failed", logging.ERROR, why=str(error))
                await asyncio.sleep(_RETRY_S)

    def _follow(
        self, here: Mapping[WorkerId, RegisteredAddress], make_link: LinkFactory, group: asyncio.TaskGroup
    ) -> None:
        self.trouble = ""
        for worker, link in list(self._links.items()):
            record = here.get(worker)
            if record is None:
                link.is_registered = False
                if not link.is_up:
                    self._drop(link)
            elif record.incarnation != link.where.incarnation or record.address != link.where.address:
                self._drop(link)
            else:
                link.is_registered = True
        for worker, record in here.items():
            if worker not in self._links:
                where = WorkerAddress(
                    worker=worker, incarnation=Incarnation(record.incarnation), address=record.address
                )
                self._add(make_link(where), group)

    def _add(self, link: WorkerLink, group: asyncio.TaskGroup) -> None:
        self._links[link.worker] = link
        task = group.create_task(link.run(), name=f"link to {link.worker}")
        self._tasks[link] = task
        task.add_done_callback(lambda _: self._forget(link))

    def _drop(self, link: WorkerLink) -> None:
        self._links.pop(link.worker, None)
        self._kept.pop(link.worker, None)
        task = self._tasks.get(link)
        if task is not None:
            task.cancel()

    def _forget(self, link: WorkerLink) -> None:
        self._tasks.pop(link, None)
        if self._links.get(link.worker) is link:
            del self._links[link.worker]
            self._kept.pop(link.worker, None)


@dataclass(slots=True)
class _Kept:
    """A candidate and what it was made of."""

    link: WorkerLink
    load: ReportedLoad
    changes: int
    is_stale: bool
    facts: WorkerFacts | None
    candidate: Candidate


def _holding(candidate: Candidate, view: PrefixView) -> Candidate:
    """Add the prompt's prefix there, from `view`."""
    worker = candidate.worker
    held, reusable = view.held_tokens.get(worker, 0), view.reusable_tokens.get(worker, 0)
    lossy = view.lossy_tokens.get(worker)
    if not held and not reusable and not lossy:
        return candidate
    return dataclasses.replace(candidate, held_tokens=held, reusable_tokens=reusable, lossy_tokens=lossy or {})


def _candidate(link: WorkerLink, link_speed: SpeedOf, now_s: float) -> Candidate:
    """As if no worker held anything of the prompt."""
    facts, load, outstanding = link.facts, link.load, link.outstanding
    if facts is None:
        raise RuntimeError(f"link to {link.worker} is down")
    # Reports lag by 100 ms: what this router sent since is added at once, and stands for them once they are old.
    sent = outstanding.uncounted(now_s)
    queue = prompts(sent)
    is_stale = outstanding.is_stale(now_s)
    return Candidate(
        worker=facts.worker,
        incarnation=facts.incarnation,
        role=facts.role,
        queued_tokens=(0 if is_stale else load.queued_tokens) + sum(work.tokens for work in queue),
        queued_requests=(0 if is_stale else load.queued_requests) + len(queue),
        queue=queue if is_stale else (*load.queue, *queue),
        rules=load.queue_rules,
        in_flight=(0 if is_stale else load.in_flight) + len(sent),
        running=0 if is_stale else load.decoding_sequences,
        free_blocks=max(0, load.free_blocks - sum(one.blocks for one in sent)),
        total_blocks=load.total_blocks,
        last_used=link.last_used,
        host=facts.address.rpartition(":")[0],
        prefill_speed=load.prefill_speed,
        decode_step_s=load.decode_step_s,
        decode_sequence_s=load.decode_sequence_s,
        computing=0.0 if is_stale else link.computing.share,
        tokens_in_transfer=outstanding.tokens_in_transfer,
        profile=facts.profile,
        link_speed=functools.partial(link_speed, facts.worker),
    )


class RedisDirectory:
    """Registered workers, as Redis has them: the source of the worker table. Keeps the index replica on the same
    workers."""

    def __init__(self, redis: Redis, keys: Keys, replica: IndexReplica) -> None:
        self._watcher = RegistryWatcher(redis, keys)
        self._replica = replica

    async def run(self, on_change: Callable[[Mapping[WorkerId, RegisteredAddress]], None]) -> None:
        def changed(records: Mapping[WorkerId, WorkerRecord]) -> None:
            self._replica.set_workers({worker: record.incarnation for worker, record in records.items()})
            on_change(records)

        await self._watcher.run(changed)

    def note_beat(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self._watcher.note_beat(worker, incarnation)


_MOST_ENDS = 64
"""Workers on either side with links that are looked at for a median."""


class LinkEnd(Protocol):
    """The fields that are read of a link to a worker."""

    @property
    def facts(self) -> WorkerFacts | None: ...
    @property
    def used_links(self) -> Sequence[ReportedLink]: ...


class LinkSpeedView:
    """Speed of KV between workers, from their links and the cluster's measurements.

    `set_rows` from time to time, `bytes_per_s` for every plan: it is a few look-ups.
    """

    def __init__(self) -> None:
        self._speeds: dict[Route, LinkSpeed] = {}
        self._rows: list[LinkSpeed] = []
        self._found: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], float | None] = {}
        """Speeds found in `_speeds` for a pair of hosts and the transports of either; plans ask for every pair of
        workers."""

    @property
    def rows(self) -> Sequence[LinkSpeed]:
        """Every measurement and failure that the cluster knows, as of the last reading."""
        return self._rows

    def set_rows(self, rows: Iterable[LinkSpeed]) -> None:
        """The complete list, read anew."""
        self._rows = list(rows)
        self._speeds = {row.route: row for row in self._rows if not row.failure}
        self._found = {}

    def bytes_per_s(self, prefill: LinkEnd | None, decode: LinkEnd | None) -> float | None:
        """Measured from one worker to the other: of the slowest link of rank 0 in use; else of the fastest transport
        that both have, between their hosts. None = not measured."""
        if prefill is None or decode is None or prefill.facts is None or decode.facts is None:
            return None
        if links := prefill.used_links:
            peer = decode.facts.worker
            used = [link.bytes_per_s for link in links if link.peer == peer and link.rank == 0 and link.bytes_per_s > 0]
            if used:
                return min(used)
        return self._between_hosts(prefill.facts, decode.facts)

    def median(self, senders: Sequence[LinkEnd], receivers: Sequence[LinkEnd]) -> float:
        """Median of `bytes_per_s` from one worker to another, of the pairs that were measured; 0 = none was."""
        found: list[float] = []
        for sender in senders[:_MOST_ENDS]:
            if sender.facts is None:
                continue
            used: dict[WorkerId, float] = {}
            for link in sender.used_links:
                if link.rank == 0 and link.bytes_per_s > 0:
                    used[link.peer] = min(link.bytes_per_s, used.get(link.peer, math.inf))
            for receiver in receivers[:_MOST_ENDS]:
                if receiver.facts is None or receiver.facts.worker == sender.facts.worker:
                    continue
                speed = used.get(receiver.facts.worker) or self._between_hosts(sender.facts, receiver.facts)
                found += [speed] if speed and speed < math.inf else []
        return statistics.median(found) if found else 0.0

    def _between_hosts(self, sender: WorkerFacts, receiver: WorkerFacts) -> float | None:
        key = (sender.host, receiver.host, sender.transports, receiver.transports)
        if key not in self._found:
            speeds = (self._speeds.get((*key[:2], name)) for name in sender.transports if name in receiver.transports)
            self._found[key] = max((row.bytes_per_s for row in speeds if row is not None), default=None)
        return self._found[key]
