"""Adopts the stored desired state at the start of a controller, or replaces it by the configured one.

The record holds what operators asked for, and outlives the process that carries it out. The configuration with which it
was begun is kept beside it: while that is the same, a start is the next controller's and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tandem.core.desired import DesiredState
from tandem.core.errors import ConfigError, StartupError
from tandem.core.events import EventKind
from tandem.statestore.stores.desired import DesiredStateStore, Recorded

_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialState:
    """The decision. `kind` None: there is nothing to report, as only the configured state stood there.

    `is_continued`: the record differs from the configuration and stays. Workers of it may never have worked.
    """

    is_continued: bool = False
    kind: EventKind | None = None
    reason: str = ""


async def begin(
    store: DesiredStateStore, desired: Callable[[int], DesiredState], *, as_configured: bool = False
) -> InitialState:
    """Make sure that a desired state is stored. `desired(version)`: the configured one.

    The record stays, of its version and age, if it is as configured, or was begun with the same configuration; unless
    the cluster was stopped by `down`, or `as_configured` is set. Raises StartupError.
    """
    configured = desired(1)
    for _ in range(_TRIES):
        found = await store.recorded()
        wanted = desired(found.version + 1)
        if found.state == replace(wanted, version=found.version):
            if found.configured == configured or await store.note_configured(configured, found.version):
                return InitialState()
            continue
        why = "`--as-configured` was given" if as_configured else _why_not_kept(found, configured)
        if not why:
            return _kept(found, wanted)
        if await store.save(wanted, found.version, configured=configured):
            return _replaced(found, wanted, why)
    raise StartupError("cannot write the desired state", why="another writer keeps changing it", todo="Try again")


def _why_not_kept(found: Recorded, configured: DesiredState) -> str:
    """Return why the record is replaced; "" if it stays."""
    if found.state is None:
        return found.trouble or "there was none"
    if found.state.is_stopped:
        return "`down` had ended the cluster"
    if found.configured is None:
        return "nothing says what was configured when it was written"
    if found.configured != configured:
        return "another configuration was given"
    try:
        found.state.validate()
    except ConfigError as error:
        return error.message
    return ""


def _kept(found: Recorded, configured: DesiredState) -> InitialState:
    assert found.state is not None
    what = ", ".join(_differences(configured, found.state)) or "workers were started anew"
    reason = f"version {found.version} goes on ({what}): the configuration is the same; `--as-configured` resets it"
    return InitialState(is_continued=True, kind=EventKind.DESIRED_KEPT, reason=reason)


def _replaced(found: Recorded, configured: DesiredState, why: str) -> InitialState:
    if found.state is None:
        what = f"what stood there, version {found.version}" if found.version else ""
    else:
        what = ", ".join(_differences(found.state, configured))
    if not what:
        return InitialState()
    reason = f"version {configured.version} is as configured ({what}): {why}"
    return InitialState(kind=EventKind.DESIRED_REPLACED, reason=reason)


def _differences(before: DesiredState, after: DesiredState) -> Iterator[str]:
    """Yield the differences as text, such as "prefill 1 → 2"."""
    were, are = ({pool.name: pool for pool in state.pools} for state in (before, after))
    for name in {**were, **are}:
        was, now = (pools[name].count if name in pools else 0 for pools in (were, are))
        if was != now:
            yield f"{name} {was} → {now}"
    for name in were.keys() & are.keys():
        if were[name].revision != are[name].revision:
            yield f"{name} of revision {were[name].revision} → {are[name].revision}"
        elif replace(were[name], count=0) != replace(are[name], count=0):
            yield f"{name} of another model, TP or hardware"
    for state, sign in ((before, "−"), (after, "+")):
        for rollout in state.rollouts:
            if state.under_way(rollout.model) is not None:
                yield f"{sign} the rollout to {rollout.revision}, {rollout.phase}"
        for member in state.members:
            other = (after if state is before else before).member(member.worker_id)
            if member.is_cordoned and not (other is not None and other.is_cordoned):
                yield f"{sign} the drain of {member.worker_id}"
    if before.max_ranks != after.max_ranks:
        yield f"max_ranks {before.max_ranks} → {after.max_ranks}"
    if before.drain_deadline_s != after.drain_deadline_s:
        yield f"drain deadline {before.drain_deadline_s:g} s → {after.drain_deadline_s:g} s"
    if {member.worker_id for member in before.members} != {member.worker_id for member in after.members}:
        yield "other workers by name"
