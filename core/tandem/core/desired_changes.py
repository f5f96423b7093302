"""Pure operations on the desired state: each function takes a state and returns the next one.

All are idempotent but `restarted`; versions stay as they are, for the writer of the record to raise. An impossible
request raises ConflictError, an unknown worker NotFoundError with the nearest name.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tandem.core.desired import DesiredState, DesiredWorker, Pool, is_covered, roles_of
from tandem.core.errors import ConfigError, ConflictError, NotFoundError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Load by which victims are chosen: requests in flight, and bytes of KV that no other worker holds."""

    in_flight: int = 0
    unique_prefix_bytes: int = 0


class ChangeKind(StrEnum):
    """Effect of a change of the record on one worker."""

    START = "start"
    STOP = "stop"
    FLIP = "flip"
    DRAIN = "drain"
    UNCORDON = "uncordon"
    RESTART = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChange:
    """One line of a diff."""

    deed: ChangeKind
    worker_id: WorkerId
    detail: str = ""


def with_scale(
    state: DesiredState,
    counts: Mapping[RoleName, int],
    loads: Mapping[WorkerId, WorkerLoad],
    *,
    model: str = "",
    may_flip: bool = True,
) -> DesiredState:
    """Return the state with so many workers of each role in `counts`; other roles stay. `model` "" = the only one.

    Victims are those that are drained already or do not run, then those with the least load, then with the least KV
    that only they hold. Where another role needs more workers, those of them that hold the most change their role, if
    pools are alike in ranks and hardware; the others leave. New workers take the lowest free numbers of their pool.
    ConflictError for too many workers, before any victim is chosen, and while a rollout is under way.
    """
    check_still(state, model_of(state, model))
    pools = {pool.role: pool for pool in state.pools if pool.model == model_of(state, model)}
    missing = next((role for role, count in counts.items() if role not in pools and count), None)
    if missing is not None:
        raise ConflictError(f"there is no pool of {missing} workers", todo="add it to the configuration of `up`")
    sizes = {pools[role].name: count for role, count in counts.items() if role in pools}
    _valid(replace(state, pools=tuple(replace(p, count=sizes.get(p.name, p.count)) for p in state.pools), members=()))
    members, spare = list(state.members), list[DesiredWorker]()
    for role, count in counts.items():
        mine = [member for member in members if role in pools and member.pool == pools[role].name]
        spare += sorted(mine, key=_victim_order(loads))[: max(0, len(mine) - count)]
    for role, count in counts.items():
        if role in pools:
            pool = pools[role]
            lacking = count - sum(member.pool == pool.name for member in members)
            members = _with_more(state, members, pool, lacking, spare if may_flip else [])
    gone = {member.worker_id for member in spare}
    return _valid(with_members(state, [member for member in members if member.worker_id not in gone]))


def split(state: DesiredState, ratio: tuple[int, int], total: int, *, model: str = "") -> dict[RoleName, int]:
    """Prefill and decode workers in the nearest ratio that `total` of them allow, at least one each; 0 = the present
    total."""
    now = roles_of(state.pools, model_of(state, model))
    total = total or now[RoleName.PREFILL] + now[RoleName.DECODE]
    if total < 2:
        raise ConflictError(f"{total} workers cannot be split", todo="use --total 2 or more")
    prefill = min(total - 1, max(1, round(total * ratio[0] / sum(ratio))))
    return {RoleName.PREFILL: prefill, RoleName.DECODE: total - prefill}


def with_role(state: DesiredState, worker: str, role: RoleName) -> DesiredState:
    """Return the state with `worker` in another role, with its weights, ranks and prefix cache."""
    member = member_named(state, worker)
    pool = state.pool(member.pool)
    if member.role is role:
        return state
    check_still(state, pool.model)
    target = next((other for other in state.pools if other.model == pool.model and other.role is role), None)
    if target is None:
        raise ConflictError(f"there is no pool of {role} workers", todo="add it to the configuration of `up`")
    if not _are_alike(pool, target):
        raise ConflictError(
            f"{worker} cannot become a {role} worker",
            why=f"{pool.name} has TP {pool.tp} on {pool.hardware}, {target.name} TP {target.tp} on {target.hardware}",
            todo="scale instead",
        )
    after = _valid(_with(state, replace(member, pool=target.name, role=role)))
    if not member.is_cordoned and not is_covered(member.role, _remaining_roles(state, after.members, pool.model)):
        raise ConflictError(
            f"{worker} cannot become a {role} worker now",
            why=f"no other worker could do what a {member.role} worker does meanwhile",
            todo="add one with `clusterctl scale` first",
        )
    return after


def cordoned(state: DesiredState, worker: str, *, is_cordoned: bool, deadline_s: float | None = None) -> DesiredState:
    """Return the state with `worker` cordoned and drained within `deadline_s` (None: as before, or the record's), or
    with work again."""
    member = member_named(state, worker)
    deadline_s = (member.drain_deadline_s if deadline_s is None else deadline_s) if is_cordoned else None
    return _valid(_with(state, replace(member, is_cordoned=is_cordoned, drain_deadline_s=deadline_s)))


def restarted(state: DesiredState, worker: str) -> DesiredState:
    """Return the state in which `worker` restarts. ConflictError if no other could do its work meanwhile."""
    member = member_named(state, worker)
    if not member.is_cordoned:
        try:
            cordoned(state, worker, is_cordoned=True)
        except ConflictError as error:
            raise ConflictError(
                f"{worker} cannot be restarted now",
                why=f"no other worker could do what a {member.role} worker does meanwhile",
                todo="add one with `clusterctl scale` first",
            ) from error
    return _with(state, replace(member, restart_generation=member.restart_generation + 1))


def changes(before: DesiredState, after: DesiredState) -> list[RecordChange]:
    """Return the difference, worker by worker: leaving ones first, new ones last."""
    found: list[RecordChange] = []
    were, are = ({member.worker_id: member for member in state.members} for state in (before, after))
    for member in before.members:
        found += _changed(member, are.get(member.worker_id))
    for member in after.members:
        if member.worker_id not in were:
            found.append(
                RecordChange(
                    deed=ChangeKind.START, worker_id=member.worker_id, detail=f"as {member.role} in {member.pool}"
                )
            )
    return found


def check_still(state: DesiredState, model: str) -> None:
    """ConflictError while a rollout of the model is under way: until it is over, it decides which workers exist."""
    rollout = state.under_way(model)
    if rollout is not None:
        raise ConflictError(
            f"a rollout of {model} to {rollout.revision} is {rollout.phase.value}",
            why="until it is over, it decides which workers there are",
            todo="wait for it, or go back with `clusterctl rollout undo`",
        )


def model_of(state: DesiredState, model: str) -> str:
    """`model`, or the only one; ConflictError where that is not clear, NotFoundError if no pool computes it."""
    models = list(dict.fromkeys(pool.model for pool in state.pools))
    if model in models:
        return model
    if model:
        raise NotFoundError(f"there is no model {model[:80]!r}", todo=_nearest(model, models))
    if len(models) != 1:
        raise ConflictError(
            "it is not clear which model is meant", why=f"there are {', '.join(models)}", todo="name it with --model"
        )
    return models[0]


def member_named(state: DesiredState, worker: str) -> DesiredWorker:
    """NotFoundError with the nearest name if there is none."""
    member = state.member(worker)
    if member is None:
        names = [str(member.worker_id) for member in state.members]
        raise NotFoundError(f"there is no worker {worker[:80]!r}", todo=_nearest(worker, names))
    return member


def with_members(state: DesiredState, members: Sequence[DesiredWorker]) -> DesiredState:
    """Return the state with these members, and with pools that count them."""
    sizes = {pool.name: sum(member.pool == pool.name for member in members) for pool in state.pools}
    pools = tuple(replace(pool, count=sizes[pool.name]) for pool in state.pools)
    return replace(state, pools=pools, members=tuple(members))


def _with(state: DesiredState, changed: DesiredWorker) -> DesiredState:
    return with_members(
        state, [changed if member.worker_id == changed.worker_id else member for member in state.members]
    )


def _valid(state: DesiredState) -> DesiredState:
    """Validate it: ConflictError for a state that could not serve or breaks the bound."""
    try:
        state.validate()
    except ConfigError as error:
        raise ConflictError(error.what, why=error.why, todo=error.todo) from error
    return state


def _with_more(
    state: DesiredState, members: Sequence[DesiredWorker], pool: Pool, lacking: int, spare: list[DesiredWorker]
) -> list[DesiredWorker]:
    """`lacking` more in `pool`: of `spare`, those about to leave that take another role instead, or new workers."""
    going, taken = {member.worker_id for member in spare}, {member.worker_id for member in members}
    stay = (
        _remaining_roles(state, [m for m in members if m.worker_id not in going], pool.model)
        if spare
        else set[RoleName]()
    )
    names = (name for number in itertools.count() if (name := WorkerId(f"{pool.name}-{number}")) not in taken)
    changed, new = dict[WorkerId, DesiredWorker](), list[DesiredWorker]()
    alike = {other.name for other in state.pools if _are_alike(other, pool)}
    for _ in range(lacking):
        able = (m for m in reversed(spare) if m.pool in alike and not m.is_cordoned and is_covered(m.role, stay))
        chosen = next(able, None)
        if chosen is not None:
            spare.remove(chosen)
            changed[chosen.worker_id] = replace(chosen, pool=pool.name, role=pool.role)
        else:
            new.append(DesiredWorker(worker_id=next(names), pool=pool.name, role=pool.role))
            stay.add(pool.role)
    return [*(changed.get(member.worker_id, member) for member in members), *new]


def _remaining_roles(before: DesiredState, members: Sequence[DesiredWorker], model: str) -> set[RoleName]:
    """Roles in which a member works on, or will work; members that change roles meanwhile do not count."""
    known = {member.worker_id: member for member in before.members}
    return {
        member.role
        for member in members
        if not member.is_cordoned
        and before.pool(member.pool).model == model
        and (was := known.get(member.worker_id, member)).role is member.role
        and was.restart_generation == member.restart_generation
    }


def _victim_order(
    loads: Mapping[WorkerId, WorkerLoad],
) -> Callable[[DesiredWorker], tuple[bool, bool, int, int, int, str]]:
    def key(member: DesiredWorker) -> tuple[bool, bool, int, int, int, str]:
        load, name = loads.get(member.worker_id), str(member.worker_id)
        number = name.rpartition("-")[2]
        youngest_first = -int(number) if number.isdecimal() else 0
        known = load or WorkerLoad()
        return (
            not member.is_cordoned,
            load is not None,
            known.in_flight,
            known.unique_prefix_bytes,
            youngest_first,
            name,
        )

    return key


def _are_alike(one: Pool, other: Pool) -> bool:
    return (one.model, one.tp, one.hardware, one.revision) == (other.model, other.tp, other.hardware, other.revision)


def _changed(before: DesiredWorker, after: DesiredWorker | None) -> list[RecordChange]:
    worker = before.worker_id
    if after is None:
        return [RecordChange(deed=ChangeKind.STOP, worker_id=worker, detail=f"drained first, was {before.role}")]
    found: list[RecordChange] = []
    if after.role is not before.role:
        found.append(RecordChange(deed=ChangeKind.FLIP, worker_id=worker, detail=f"from {before.role} to {after.role}"))
    if (after.restart_generation, after.revision) != (before.restart_generation, before.revision):
        to = f"to revision {after.revision}" if after.revision != before.revision else "drained first"
        found.append(RecordChange(deed=ChangeKind.RESTART, worker_id=worker, detail=to))
    own_s = after.drain_deadline_s
    if after.is_cordoned and not before.is_cordoned:
        moves = "" if own_s is None else f"; what still runs after {own_s:g} s moves to other workers"
        found.append(RecordChange(deed=ChangeKind.DRAIN, worker_id=worker, detail=f"no new work{moves}"))
    elif after.is_cordoned and own_s is not None and own_s != before.drain_deadline_s:
        found.append(
            RecordChange(deed=ChangeKind.DRAIN, worker_id=worker, detail=f"within {own_s:g} s, once it is told anew")
        )
    elif before.is_cordoned and not after.is_cordoned:
        found.append(RecordChange(deed=ChangeKind.UNCORDON, worker_id=worker))
    return found


def _nearest(given: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, names, n=1)
    return (
        f"did you mean {close[0]}? There are {', '.join(names[:8])}" if close else f"there are {', '.join(names[:8])}"
    )
