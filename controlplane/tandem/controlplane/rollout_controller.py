"""Takes the steps of rollouts, and reports them: the only changes of the desired state made here without an operator.

The next step is decided in core/rollouts.py, from the record and the running workers; it is written like every change
of the record, onto the version that was read. A concurrent change wins, and the step is computed again from there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tandem.controlplane.reconcile import ObservedPhase, ObservedWorker
from tandem.core.desired import DesiredState, DesiredWorker, Rollout, RolloutPhase
from tandem.core.errors import TandemError, UnavailableError
from tandem.core.events import EventKind, EventSink
from tandem.core.ids import WorkerId
from tandem.core.rollouts import Standing, advanced

DEATHS_THAT_COUNT = 3
"""A worker of a new revision that was ready and died so often stops the rollout."""
_CAN_STAY = (ObservedPhase.READY, ObservedPhase.DRAINING, ObservedPhase.DRAINED)
Save = Callable[[DesiredState, int], Awaitable[bool]]
"""Writes a state if the stored version is that one; False = it was changed concurrently."""


class Rolling:
    """The steps of all rollouts of one cluster. It remembers its reports, and the writes without confirmation."""

    def __init__(self, save: Save, events: EventSink) -> None:
        self._save, self._events = save, events
        self._told: DesiredState | None = None
        self._unsure: list[tuple[DesiredState, DesiredState]] = []
        """Steps, before and after, without a response to their write: they are reported once they are the state."""
        self._trouble = ""

    async def step(
        self,
        state: DesiredState,
        seen: Sequence[ObservedWorker],
        held: Collection[WorkerId],
        broken: Mapping[WorkerId, str],
    ) -> bool:
        """Take the next step, if there is one; True if a rollout is in progress.

        `state` may be older than the last write: a step onto it is refused and not reported again, or is needed, as
        a store that failed over may have lost that write.
        """
        self._note_version(state)
        if not is_rolling(state):
            return False
        standings = [standing(one, state, is_held=one.worker_id in held) for one in seen]
        after = advanced(state, standings, broken)
        if after != state:
            await self._write(state, replace(after, version=state.version + 1))
        return any(one.phase is RolloutPhase.ROLLING for one in state.rollouts)

    async def _write(self, before: DesiredState, after: DesiredState) -> None:
        try:
            is_saved = await self._save(after, before.version)
        except TandemError as error:  # it is tried again at the next look
            is_unsure = isinstance(error, UnavailableError)
            if is_unsure and (before, after) not in self._unsure:
                self._unsure.append((before, after))
            if error.message != self._trouble:
                what = "no answer to the next step" if is_unsure else "the next step is not written"
                self._events.record(EventKind.ROLLOUT, "cluster", f"{what}: {error.message}")
            self._trouble = error.message
            return
        self._trouble = ""
        if is_saved:
            self._tell(before, after)

    def _note_version(self, state: DesiredState) -> None:
        for before, after in [pair for pair in self._unsure if pair[1].version <= state.version]:
            self._unsure.remove((before, after))
            if after == state:
                self._tell(before, after)

    def _tell(self, before: DesiredState, after: DesiredState) -> None:
        if after != self._told:
            self._told = after
            for model, text in _told(before, after):
                self._events.record(EventKind.ROLLOUT, model, text)


def is_rolling(state: DesiredState) -> bool:
    """True if some rollout is not over."""
    return any(one.phase is not RolloutPhase.DONE for one in state.rollouts)


def standing(one: ObservedWorker, state: DesiredState, *, is_held: bool = False) -> Standing:
    """Return a running worker as rollouts see it. `is_held`: it is left alone for now, and does not count."""
    member = state.member(one.worker_id)
    wanted = (member.role, state.revision_of(member), member.restart_generation) if member is not None else None
    is_as_wanted = (one.role, one.revision, one.restart_generation) == wanted
    return Standing(
        worker_id=one.worker_id,
        model=one.model,
        role=one.role,
        revision=one.revision,
        restart_generation=one.restart_generation,
        is_serving=is_as_wanted and one.life is ObservedPhase.READY and not is_held,
        can_stay=one.life in _CAN_STAY,
    )


def _told(before: DesiredState, after: DesiredState) -> Iterator[tuple[str, str]]:
    """Yield (model, description of the step)."""
    for rollout in after.rollouts:
        was = before.rollout(rollout.model)
        if was is None or was == rollout:
            yield from _told_of_members(before, after, rollout)
        elif rollout.phase is RolloutPhase.FAILED:
            yield rollout.model, f"to {rollout.revision}: stopped, as a worker of it does not work: {rollout.reason}"
        elif rollout.phase is RolloutPhase.DONE:
            yield rollout.model, f"to {rollout.revision}: done, no worker of {rollout.previous} is left"


def _told_of_members(before: DesiredState, after: DesiredState, rollout: Rollout) -> Iterator[tuple[str, str]]:
    here, there = ({member.worker_id: member for member in state.members} for state in (before, after))
    come = [name for name, member in there.items() if name not in here and _is_of(after, member, rollout)]
    go = [name for name, member in here.items() if name not in there and _is_of(before, member, rollout)]
    parts = [f"{', '.join(come)} to come"] if come else []
    parts += [f"{', '.join(go)} to leave"] if go else []
    if parts:
        yield rollout.model, f"to {rollout.revision}: {'; '.join(parts)}"


def _is_of(state: DesiredState, member: DesiredWorker, rollout: Rollout) -> bool:
    return state.pool(member.pool).model == rollout.model
