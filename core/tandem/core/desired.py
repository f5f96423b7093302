"""The desired state of a cluster: one versioned record of pools and their members that controllers reconcile towards.

Controllers converge to this record and need nothing else for that. A removed member stops, a changed role flips it,
another `restart_generation` restarts it. Changes to it are in desired_changes.py and rollouts.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tandem.core.errors import ConfigError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

DRAIN_DEADLINE_S = 60.0
"""After so long a drain no longer waits for answers: requests that still run migrate to another worker."""
MAX_WORKERS = 1024
"""Most workers of one cluster."""
INITIAL = "initial"
"""Revision of workers as configured."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of pools and workers: they are part of file names and of keys of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A set of equal workers: `count` workers of `tp` ranks with one model and role on one hardware class.

    `revision`: of its members that name none; all pools of a model have the same.
    """

    name: str
    model: str
    role: RoleName
    count: int
    revision: str = INITIAL
    tp: int = 1
    hardware: str = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredWorker:
    """One worker that should be there, in `role`, which is its pool's. It keeps its id over restarts and flips.

    `is_cordoned`: it runs and gets no work. `restart_generation` rises by one with every request to restart it.
    `revision` "" = its pool's. `drain_deadline_s`: how long this drain may take; None = the record's.
    """

    worker_id: WorkerId
    pool: str
    role: RoleName
    is_cordoned: bool = False
    restart_generation: int = 0
    revision: str = ""
    drain_deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """Settings of the workers of `model` under that name, on top of what `up` was configured with: another folder with
    the model's files ("" = the configured one), and settings by their place, such as {"worker.chunk_tokens": "256"}."""

    name: str
    model: str
    model_path: str = ""
    settings: dict[str, str] = field(default_factory=dict)


class RolloutPhase(StrEnum):
    """FAILED: it stopped by itself, as workers of the new revision do not work. DONE: only the new revision is left."""

    ROLLING = "rolling"
    PAUSED = "paused"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Workers of `model` are replaced, until all are of `revision`; a model's last one stays in the record.

    `sizes`: by pool, the number of workers. `max_surge`: so many more than that of a pool may run meanwhile, and
    `max_unavailable`: so many fewer may serve. `reason`: why it failed. `is_undo`: it restores the revision before.
    """

    model: str
    revision: str
    previous: str
    sizes: dict[str, int]
    phase: RolloutPhase = RolloutPhase.ROLLING
    reason: str = ""
    is_undo: bool = False
    max_surge: int = 1
    max_unavailable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """All pools and their members; `version` rises by one with every change; `is_stopped` asks the controller to end
    the cluster.

    `max_ranks`: never more ranks than that at once, old and new workers together; 0 = no bound. `drain_deadline_s`: how
    long a worker that leaves, restarts, flips or is cordoned may take to finish what it has, unless its member sets its
    own. `revisions`: those that differ from the configuration and may be wanted.
    """

    version: int
    pools: tuple[Pool, ...]
    members: tuple[DesiredWorker, ...] = ()
    max_ranks: int = 0
    drain_deadline_s: float = DRAIN_DEADLINE_S
    is_stopped: bool = False
    revisions: tuple[Revision, ...] = ()
    rollouts: tuple[Rollout, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks of all pools together."""
        return sum(pool.count * pool.tp for pool in self.pools)

    def pool(self, name: str) -> Pool:
        """The pool of that name; KeyError if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def member(self, worker_id: str) -> DesiredWorker | None:
        """The member of that id, if it should be there."""
        return next((member for member in self.members if member.worker_id == worker_id), None)

    def drain_deadline_of(self, worker_id: str) -> float:
        """Seconds that this worker, wanted or not, may take to finish what it has."""
        member = self.member(worker_id)
        own_s = member.drain_deadline_s if member is not None else None
        return self.drain_deadline_s if own_s is None else own_s

    def revision_of(self, member: DesiredWorker) -> str:
        """The wanted revision of this member."""
        return member.revision or self.pool(member.pool).revision

    def revision(self, model: str, name: str) -> Revision | None:
        """Return the settings that differ under that name; None = nothing differs."""
        return next((one for one in self.revisions if (one.model, one.name) == (model, name)), None)

    def rollout(self, model: str) -> Rollout | None:
        """The model's last rollout, over or not."""
        return next((one for one in self.rollouts if one.model == model), None)

    def under_way(self, model: str) -> Rollout | None:
        """The model's rollout, if it is not over."""
        rollout = self.rollout(model)
        return rollout if rollout is not None and rollout.phase is not RolloutPhase.DONE else None

    def filled(self) -> DesiredState:
        """Fill in members where none are named: `<pool>-0`, `<pool>-1` …, as many as each pool counts."""
        if self.members:
            return self
        members = [
            DesiredWorker(worker_id=WorkerId(f"{pool.name}-{number}"), pool=pool.name, role=pool.role)
            for pool in self.pools
            for number in range(pool.count)
        ]
        return replace(self, members=tuple(members))

    def validate(self) -> None:
        """Raise ConfigError when no request could ever be served, the bound is broken or members do not fit."""
        if any(p.count < 0 for p in self.pools):
            raise ConfigError("a pool has a negative count", todo="use 0 or more workers")
        count = sum(p.count for p in self.pools)
        if count > MAX_WORKERS:
            raise ConfigError(
                f"{count} workers are more than a cluster may have",
                why=f"the limit is {MAX_WORKERS}",
                todo="ask for fewer workers",
            )
        for deadline_s in (self.drain_deadline_s, *(member.drain_deadline_s for member in self.members)):
            if deadline_s is not None and not 0 <= deadline_s < math.inf:
                raise ConfigError(f"a drain deadline is {deadline_s} s", todo="use 0 or more seconds")
        self._validate_members()
        self._validate_revisions()
        if self.max_ranks and self.ranks > self.max_ranks:
            raise ConfigError(
                f"{self.ranks} ranks are more than the cluster may have",
                why=f"max_ranks is {self.max_ranks}",
                todo="ask for fewer workers, or raise max_ranks in the configuration",
            )
        models = tuple(dict.fromkeys(p.model for p in self.pools)) or ("",)
        for model in models:
            self._validate_model(model, f" of {model}" if len(models) > 1 else "")

    def _validate_members(self) -> None:
        pools = {pool.name: pool for pool in self.pools}
        if len(pools) < len(self.pools):
            raise ConfigError("two pools have the same name")
        named = (*pools, *(member.worker_id for member in self.members))
        wrong_name = next((name for name in named if _NAME.fullmatch(name) is None), None)
        if wrong_name is not None:
            raise ConfigError(
                f"{wrong_name[:80]!r} cannot name a pool or a worker",
                todo="use up to 128 letters, digits, dots, dashes and underscores, a letter or digit first",
            )
        if len({member.worker_id for member in self.members}) < len(self.members):
            raise ConfigError("a worker appears twice in the desired state")
        for member in self.members:
            if member.pool not in pools or pools[member.pool].role != member.role:
                raise ConfigError(
                    f"{member.worker_id} is {member.role} in {member.pool}", why="no such pool has that role"
                )
        sizes = Counter(member.pool for member in self.members)
        wrong = next((pool for pool in self.pools if sizes[pool.name] != pool.count), None)
        if self.members and wrong is not None:
            raise ConfigError(f"pool {wrong.name} counts {wrong.count} workers and names {sizes[wrong.name]}")

    def _validate_revisions(self) -> None:
        names = [one.name for one in self.revisions]
        names += [name for one in self.rollouts for name in (one.revision, one.previous)]
        wrong = next((name for name in names if _NAME.fullmatch(name) is None), None)
        if wrong is not None:
            raise ConfigError(
                f"{wrong[:140]!r} cannot name a revision",
                todo="use up to 128 letters, digits, dots, dashes and underscores, a letter or digit first",
            )
        if len({one.model for one in self.rollouts}) < len(self.rollouts):
            raise ConfigError("a model has two rollouts")
        for one in self.rollouts:
            if one.max_surge < 0 or one.max_unavailable < 0 or one.max_surge + one.max_unavailable < 1:
                raise ConfigError(
                    "a rollout cannot go on",
                    why="no worker may be too many, and none too few",
                    todo="use --max-surge 1, or --max-unavailable 1",
                )

    def _validate_model(self, model: str, of: str) -> None:
        cordoned = Counter(member.pool for member in self.members if member.is_cordoned)
        counts = roles_of(self.pools, model)
        able = roles_of((replace(pool, count=pool.count - cordoned[pool.name]) for pool in self.pools), model)
        if able[RoleName.MIXED] == 0 and not (able[RoleName.PREFILL] and able[RoleName.DECODE]):
            but = f", {sum(cordoned.values())} of them drained," if cordoned else ""
            prefill, decode = counts[RoleName.PREFILL], counts[RoleName.DECODE]
            raise ConfigError(
                f"{prefill} prefill and {decode} decode workers{of}{but} cannot serve",
                why="a request needs one prefill and one decode worker, or one mixed worker",
                todo="start at least --prefill 1 --decode 1, or --mixed 1",
            )


def is_covered(role: RoleName, others: Collection[RoleName]) -> bool:
    """True if workers in these roles together do the work of one in `role`."""
    if RoleName.MIXED in others:
        return True
    return {RoleName.PREFILL, RoleName.DECODE} <= set(others) if role is RoleName.MIXED else role in others


def roles_of(pools: Iterable[Pool], model: str) -> Counter[RoleName]:
    """Workers of `model` by role."""
    counts: Counter[RoleName] = Counter()
    for pool in pools:
        if pool.model == model:
            counts[pool.role] += pool.count
    return counts
