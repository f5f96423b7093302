"""Rollouts: workers of one model are replaced by such of another revision, a few at a time, while both serve.

`started`, `paused`, `resumed` and `undone` are operators' requests, as those in desired_changes.py; `advanced` is the
controller's next step, given what runs. All are pure: the record holds a rollout's progress, as its members' revisions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tandem.core.desired import MAX_WORKERS, DesiredState, DesiredWorker, Pool, Revision, Rollout, RolloutPhase
from tandem.core.desired_changes import check_still, model_of, with_members
from tandem.core.errors import ConfigError, ConflictError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

_FEWER = "use --max-surge 0 --max-unavailable 1 where there are two of each role, or have fewer workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A worker that runs, wanted or not. `is_serving`: it takes new work, and is what it is wanted to be. `can_stay`:
    it could be wanted again, as it is not being stopped yet."""

    worker_id: WorkerId
    model: str
    role: RoleName
    revision: str
    restart_generation: int = 0
    is_serving: bool = False
    can_stay: bool = False


def named(model_path: str, settings: Mapping[str, str]) -> str:
    """The name of a revision that was given none: a digest of its content."""
    spelled = json.dumps([model_path, sorted(settings.items())], separators=(",", ":"))
    return f"r{hashlib.sha256(spelled.encode()).hexdigest()[:10]}"


def current_revision(state: DesiredState, model: str) -> str:
    """Revision of the model's workers; while a rollout is under way, the one with which it began."""
    return next(pool.revision for pool in state.pools if pool.model == model)


def started(
    state: DesiredState,
    *,
    model: str = "",
    name: str = "",
    model_path: str = "",
    settings: Mapping[str, str] | None = None,
    max_surge: int = 1,
    max_unavailable: int = 0,
) -> DesiredState:
    """Start to replace all workers of `model` by those of another revision: the present one, with these changes.

    `name` "" = a digest of its content. ConflictError if another rollout is under way, or this one could not go on.
    """
    model = model_of(state, model)
    now = current_revision(state, model)
    base = state.revision(model, now) or Revision(name=now, model=model)
    spec = replace(base, model_path=model_path or base.model_path, settings={**base.settings, **(settings or {})})
    spec = replace(spec, name=name or named(spec.model_path, spec.settings))
    if _same(spec, base) and name in ("", now):
        return state
    if spec.name == now or not _same(state.revision(model, spec.name) or spec, spec):
        raise ConflictError(f"revision {spec.name} already exists with other content", todo="give another name")
    rollout = state.under_way(model)
    if rollout is not None and rollout.revision == spec.name:
        return state
    check_still(state, model)
    sizes = {pool.name: pool.count for pool in state.pools if pool.model == model and pool.count}
    rollout = Rollout(
        model=model, revision=spec.name, previous=now, sizes=sizes, max_surge=max_surge, max_unavailable=max_unavailable
    )
    _check_possible(state, rollout)
    kept = [one for one in state.revisions if one.model != model or one.name == now]
    return _checked(_with_rollout(replace(state, revisions=(*kept, spec)), rollout))


def paused(state: DesiredState, *, model: str = "") -> DesiredState:
    """Keep the rollout at its current step; workers that start or leave finish doing so."""
    rollout = _there(state, model)
    return state if rollout.phase is RolloutPhase.FAILED else _in_phase(state, rollout, RolloutPhase.PAUSED)


def resumed(state: DesiredState, *, model: str = "") -> DesiredState:
    """Resume it after a pause or a failure."""
    return _in_phase(state, _there(state, model), RolloutPhase.ROLLING)


def undone(state: DesiredState, *, model: str = "") -> DesiredState:
    """Roll back to the revision before: of a rollout under way, or of the last one. Undoing twice changes nothing
    more."""
    model = model_of(state, model)
    rollout = state.rollout(model)
    if rollout is None:
        raise ConflictError(f"there was no rollout of {model}", todo="start one with `clusterctl rollout start`")
    if rollout.is_undo:
        return state
    is_over = rollout.phase is RolloutPhase.DONE
    sizes = {pool.name: pool.count for pool in state.pools if pool.model == model and pool.count}
    back = replace(
        rollout, revision=rollout.previous, previous=rollout.revision, phase=RolloutPhase.ROLLING, reason="",
        is_undo=True, sizes=sizes if is_over else rollout.sizes,
    )  # fmt: skip
    if is_over:
        _check_possible(state, back)
    return _checked(_with_rollout(state, back))


def advanced(state: DesiredState, running: Sequence[Standing], broken: Mapping[WorkerId, str]) -> DesiredState:
    """Return the record after the next step of every rollout; the same object if there is none to take.

    `broken`: members that will not work, and why. One of the new revision stops its rollout, and is no longer wanted.
    """
    for rollout in state.rollouts:
        failed = next((name for name in broken if _is_new(state, rollout, state.member(name))), None)
        if rollout.phase is not RolloutPhase.DONE and failed is not None:
            state = _stopped(state, rollout, failed, broken)
        elif rollout.phase is RolloutPhase.ROLLING:
            state = _RolloutStep(state, rollout, running).taken()
    return state


class _RolloutStep:
    """One step of one rollout. New workers come while there is room, old ones leave while enough serve, and no pool
    runs ahead of the others: workers of different revisions do not work together, so half a pair would not help."""

    def __init__(self, state: DesiredState, rollout: Rollout, running: Sequence[Standing]) -> None:
        self._state, self._rollout, self._running = state, rollout, running
        self._serving = {one.worker_id for one in running if one.is_serving}
        self._taken = {member.worker_id for member in state.members} | {one.worker_id for one in running}
        self._members = list(state.members)

    def taken(self) -> DesiredState:
        pools = [pool for pool in self._state.pools if pool.model == self._rollout.model]
        self._replace_cordoned(pools)
        least = min((self._progress(pool) for pool in pools if self._size(pool)), default=Fraction(1))
        for pool in pools:
            self._part(pool, least)
            self._add(pool, least)
        if self._is_done(pools):
            return self._finished(pools)
        if self._members == list(self._state.members):
            return self._state
        return with_members(self._state, self._members)

    def _replace_cordoned(self, pools: Collection[Pool]) -> None:
        """Cordoned workers serve no requests: they restart in place, and stay cordoned."""
        names = {pool.name for pool in pools}
        self._members = [
            replace(member, revision=self._rollout.revision)
            if member.is_cordoned and member.pool in names and not self._is_new(member)
            else member
            for member in self._members
        ]

    def _part(self, pool: Pool, least: Fraction) -> None:
        """Remove old workers that may leave: first those that do not serve."""
        size, old = self._size(pool), self._of(pool, is_new=False)
        serving = sum(member.worker_id in self._serving for member in (*old, *self._of(pool, is_new=True)))
        gone = max(0, size - len(old))
        left = math.floor(size * least + Fraction(1, 2)) + self._rollout.max_unavailable - gone
        for member in sorted(old, key=lambda one: one.worker_id in self._serving):
            is_serving = member.worker_id in self._serving
            if len(self._of(pool, is_new=False)) + len(self._of(pool, is_new=True)) == 1:
                break  # the record has to name at least one member
            if is_serving and (left <= 0 or serving - 1 < max(1, size - self._rollout.max_unavailable)):
                break
            serving, left = serving - is_serving, left - 1
            self._members.remove(member)

    def _add(self, pool: Pool, least: Fraction) -> None:
        """Add new workers while there is room: first those about to leave that can stay."""
        size, new = self._size(pool), len(self._of(pool, is_new=True))
        most = min(size, math.floor(size * least) + self._rollout.max_surge + self._rollout.max_unavailable)
        room = size + self._rollout.max_surge - self._present(pool)
        for one in self._returning(pool)[: max(0, most - new)]:
            self._members.append(
                DesiredWorker(
                    worker_id=one.worker_id, pool=pool.name, role=pool.role, revision=one.revision,
                    restart_generation=one.restart_generation,
                )
            )  # fmt: skip
            new += 1
        if self._state.max_ranks:
            room = min(room, (self._state.max_ranks - with_members(self._state, self._members).ranks) // pool.tp)
        room = min(room, MAX_WORKERS - len(self._members))
        names = (name for number in itertools.count() if (name := f"{pool.name}-{number}") not in self._taken)
        for _ in range(min(room, most - new)):
            name = WorkerId(next(names))
            self._taken.add(name)
            self._members.append(
                DesiredWorker(worker_id=name, pool=pool.name, role=pool.role, revision=self._rollout.revision)
            )

    def _progress(self, pool: Pool) -> Fraction:
        """Fraction of the pool that is new and serves."""
        new = sum(member.worker_id in self._serving for member in self._of(pool, is_new=True))
        return Fraction(new, self._size(pool))

    def _size(self, pool: Pool) -> int:
        """Wanted number of serving workers."""
        cordoned = sum(member.pool == pool.name and member.is_cordoned for member in self._members)
        return max(0, self._rollout.sizes.get(pool.name, 0) - cordoned)

    def _of(self, pool: Pool, *, is_new: bool) -> list[DesiredWorker]:
        return [
            member
            for member in self._members
            if member.pool == pool.name and not member.is_cordoned and self._is_new(member) is is_new
        ]

    def _is_new(self, member: DesiredWorker) -> bool:
        return self._state.revision_of(member) == self._rollout.revision

    def _present(self, pool: Pool) -> int:
        """Workers that serve, will serve or still leave."""
        members = {member.worker_id for member in self._members if member.pool == pool.name and not member.is_cordoned}
        return len(members) + len(self._leaving(pool))

    def _leaving(self, pool: Pool) -> list[Standing]:
        wanted = {member.worker_id for member in self._members}
        mine = (one for one in self._running if (one.model, one.role) == (pool.model, pool.role))
        return [one for one in mine if one.worker_id not in wanted]

    def _returning(self, pool: Pool) -> list[Standing]:
        return [one for one in self._leaving(pool) if one.can_stay and one.revision == self._rollout.revision]

    def _is_done(self, pools: Collection[Pool]) -> bool:
        """True if no worker of another revision is left, wanted or not, and all wanted ones serve."""
        for pool in pools:
            new = self._of(pool, is_new=True)
            if self._of(pool, is_new=False) or len(new) != self._size(pool):
                return False
            if not all(member.worker_id in self._serving for member in new):
                return False
        revision, model = self._rollout.revision, self._rollout.model
        return all(one.revision == revision for one in self._running if one.model == model)

    def _finished(self, pools: Collection[Pool]) -> DesiredState:
        names = {pool.name for pool in pools}
        members = [replace(one, revision="") if one.pool in names else one for one in self._members]
        state = with_members(self._state, members)
        state = replace(
            state,
            pools=tuple(
                replace(pool, revision=self._rollout.revision) if pool.name in names else pool for pool in state.pools
            ),
        )
        return _with_rollout(state, replace(self._rollout, phase=RolloutPhase.DONE))


def _is_new(state: DesiredState, rollout: Rollout, member: DesiredWorker | None) -> bool:
    if member is None or state.pool(member.pool).model != rollout.model:
        return False
    return state.revision_of(member) == rollout.revision


def _stopped(state: DesiredState, rollout: Rollout, first: WorkerId, broken: Mapping[WorkerId, str]) -> DesiredState:
    """Remove the broken members of the new revision, if the record stays valid without them; cordoned ones go back."""
    reason = rollout.reason or f"{first}: {broken[first]}"
    marked = _with_rollout(state, replace(rollout, phase=RolloutPhase.FAILED, reason=reason))
    bad = {one.worker_id for one in state.members if one.worker_id in broken and _is_new(state, rollout, one)}
    stay = [
        replace(one, revision=rollout.previous) if one.worker_id in bad else one
        for one in state.members
        if one.worker_id not in bad or one.is_cordoned
    ]
    without = with_members(marked, stay)
    try:
        without.validate()
    except ConfigError:
        return marked
    return without


def _check_possible(state: DesiredState, rollout: Rollout) -> None:
    """ConflictError if it would reach a point where no worker may come, as none may leave."""
    serving = Counter(member.pool for member in state.members if not member.is_cordoned)
    pools = [pool for pool in state.pools if pool.model == rollout.model and serving[pool.name]]
    alone = [pool for pool in pools if serving[pool.name] == 1 or not rollout.max_unavailable]
    if not rollout.max_surge and any(serving[pool.name] == 1 for pool in pools):
        raise ConflictError(
            "a rollout without a worker more cannot go on",
            why="one role has a single worker, which has to go on serving",
            todo="use --max-surge 1",
        )
    if sum(pool.count for pool in state.pools) + len(alone) > MAX_WORKERS:
        raise ConflictError("there is no room for more workers", why=f"the limit is {MAX_WORKERS}", todo=_FEWER)
    needed = sum(pool.tp for pool in alone)
    if state.max_ranks and state.ranks + needed > state.max_ranks:
        raise ConflictError(
            f"there is no room for {needed} more ranks",
            why=f"{state.ranks} are wanted, max_ranks is {state.max_ranks}, and new workers come before old ones leave",
            todo=_FEWER,
        )


def _there(state: DesiredState, model: str) -> Rollout:
    model = model_of(state, model)
    rollout = state.under_way(model)
    if rollout is None:
        raise ConflictError(f"no rollout of {model} is under way", todo="look at `clusterctl rollout status`")
    return rollout


def _in_phase(state: DesiredState, rollout: Rollout, phase: RolloutPhase) -> DesiredState:
    if rollout.phase is phase:
        return state
    return _with_rollout(state, replace(rollout, phase=phase, reason=""))


def _with_rollout(state: DesiredState, rollout: Rollout) -> DesiredState:
    """With the one of that model in place of the one before."""
    others = tuple(one for one in state.rollouts if one.model != rollout.model)
    return replace(state, rollouts=(*others, rollout))


def _same(one: Revision, other: Revision) -> bool:
    return (one.model_path, one.settings) == (other.model_path, other.settings)


def _checked(state: DesiredState) -> DesiredState:
    try:
        state.validate()
    except ConfigError as error:
        raise ConflictError(error.what, why=error.why, todo=error.todo) from error
    return state
