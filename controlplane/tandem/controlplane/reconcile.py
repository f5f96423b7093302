"""Computes the next actions from desired and observed state. Pure.

It remembers nothing, so a controller may die after every single step, and the next one goes on where things stand. A
worker that is to lose its work is drained first, and only while another worker is ready to do that work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.desired import INITIAL, DesiredState, DesiredWorker, is_covered
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName


class ObservedPhase(StrEnum):
    """Life-cycle state of a running worker. SILENT: it was ready once, and does not answer."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    FLIPPING = "flipping"
    STOPPING = "stopping"
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """A running worker: how it was started, and its present state. `target`: the role that it is about to take."""

    worker_id: WorkerId
    model: str
    role: RoleName
    life: ObservedPhase
    target: RoleName | None = None
    ranks: int = 1
    revision: str = INITIAL
    restart_generation: int = 0


class ActionKind(StrEnum):
    """Actions on a worker. BECOME: change to its desired role."""

    START = "start"
    STOP = "stop"
    DRAIN = "drain"
    UNCORDON = "uncordon"
    BECOME = "become"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """`member`: the desired state of the worker; None = no further action."""

    deed: ActionKind
    worker_id: WorkerId
    reason: str
    member: DesiredWorker | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilePlan:
    """All actions that are possible now, and why the rest has to wait."""

    actions: tuple[Action, ...] = ()
    waits: Mapping[WorkerId, str] = field(default_factory=dict)


def plan(
    desired: DesiredState, seen: Sequence[ObservedWorker], *, held: Collection[WorkerId] = (), can_steer: bool = True
) -> ReconcilePlan:
    """Compute the plan. `held`: workers left alone for now, as a step of theirs is in progress or failed a moment ago.

    `can_steer` False: workers cannot be drained or flipped; they are stopped and started instead.
    """
    draft = _PlanBuilder(desired, seen, frozenset(held), can_steer)
    present = {one.worker_id for one in seen}
    for one in seen:
        if one.worker_id not in held:
            draft.look_at(one)
    for member in desired.members:
        if member.worker_id not in present and member.worker_id not in held:
            draft.start(member)
    return ReconcilePlan(actions=tuple(draft.actions), waits=draft.waits)


class _PlanBuilder:
    """A plan being made; the serving workers and the count of running ranks are updated as actions are added."""

    def __init__(
        self, desired: DesiredState, seen: Sequence[ObservedWorker], held: Collection[WorkerId], can_steer: bool
    ) -> None:
        self._desired, self._can_steer = desired, can_steer
        self._members = {member.worker_id: member for member in desired.members}
        self._serving = {
            one.worker_id: one for one in seen if one.life is ObservedPhase.READY and one.worker_id not in held
        }
        self._ranks = sum(one.ranks for one in seen)
        self.actions: list[Action] = []
        self.waits: dict[WorkerId, str] = {}

    def look_at(self, one: ObservedWorker) -> None:
        member = self._members.get(one.worker_id)
        if one.life in (ObservedPhase.STOPPING, ObservedPhase.FLIPPING):  # it comes to an end by itself
            if member is not None and one.target not in (None, member.role):
                self._do(ActionKind.BECOME, one.worker_id, f"it is wanted as {member.role} after all", member)
            return
        if member is None:
            self._part_with(one, "it is wanted no more")
        elif self._is_other(one, member):
            self._part_with(one, "a new start is wanted", member)
        elif member.role is not one.role:
            self._become(one, member)
        elif member.is_cordoned and one.life is ObservedPhase.READY:
            self._cordon(one, member)
        elif not member.is_cordoned and one.life in (ObservedPhase.DRAINING, ObservedPhase.DRAINED):
            self._do(ActionKind.UNCORDON, one.worker_id, "it is wanted again", member)

    def start(self, member: DesiredWorker) -> None:
        pool = self._desired.pool(member.pool)
        limit = self._desired.max_ranks
        if limit and self._ranks + pool.tp > limit:
            self.waits[member.worker_id] = f"no room for {pool.tp} more ranks: {self._ranks} run, max_ranks is {limit}"
            return
        self._ranks += pool.tp
        self._do(ActionKind.START, member.worker_id, f"pool {pool.name} wants {pool.count}", member)

    def _is_other(self, one: ObservedWorker, member: DesiredWorker) -> bool:
        revision = self._desired.revision_of(member)
        return (one.restart_generation, one.revision) != (member.restart_generation, revision)

    def _part_with(self, one: ObservedWorker, reason: str, member: DesiredWorker | None = None) -> None:
        """Drain it, then stop it; one that is not ready is stopped at once."""
        if one.life is ObservedPhase.DRAINING:
            return
        if one.life is not ObservedPhase.READY:
            self._do(ActionKind.STOP, one.worker_id, reason, member)
        elif self._can_spare(one):
            self._do(ActionKind.DRAIN if self._can_steer else ActionKind.STOP, one.worker_id, reason, member)

    def _become(self, one: ObservedWorker, member: DesiredWorker) -> None:
        reason = f"it is wanted as {member.role}"
        if one.life is ObservedPhase.SILENT:
            return  # it is on its way out; its successor has the right role
        if one.life is ObservedPhase.STARTING or not self._can_steer:
            self._part_with(one, reason, member)
        elif one.life is not ObservedPhase.READY or self._can_spare(one):
            self._do(ActionKind.BECOME, one.worker_id, reason, member)

    def _cordon(self, one: ObservedWorker, member: DesiredWorker) -> None:
        if self._can_steer and self._can_spare(one):
            self._do(ActionKind.DRAIN, one.worker_id, "it is to have no work", member)

    def _can_spare(self, one: ObservedWorker) -> bool:
        """True if another ready worker does the same work; if so, this one counts as gone. Workers of different
        revisions do not work together: one of another revision counts if that one can serve without this worker."""
        others: dict[str, set[RoleName]] = {}
        for other in self._serving.values():
            if other.model == one.model and other.worker_id != one.worker_id:
                others.setdefault(other.revision, set()).add(other.role)
        able = set(others.pop(one.revision, ()))
        able |= {role for roles in others.values() if is_covered(RoleName.MIXED, roles) for role in roles}
        if is_covered(one.role, able):
            self._serving.pop(one.worker_id, None)
            return True
        self.waits[one.worker_id] = f"no other worker is ready to do what a {one.role} worker does"
        return False

    def _do(self, deed: ActionKind, worker_id: WorkerId, reason: str, member: DesiredWorker | None) -> None:
        self.actions.append(Action(deed=deed, worker_id=worker_id, reason=reason, member=member))
