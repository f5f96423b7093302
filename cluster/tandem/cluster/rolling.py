"""Takes the steps of rollouts, and says what they are: the only changes of the desired state that no person makes here.

Which step comes next is decided in core/rollouts.py, from the record and what runs; it is written as everybody writes
the record, onto the version that was read. Who was faster counts, and the step is taken from there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tandem.cluster.reconciling import Life, Seen
from tandem.core.desired import DesiredState, Member, Rollout, RolloutPhase
from tandem.core.errors import TandemError
from tandem.core.events import EventKind, EventSink
from tandem.core.ids import WorkerId
from tandem.core.rollouts import Standing, advanced

DEATHS_THAT_COUNT = 3
"""A worker of a new revision that was ready and died so often stops the rollout."""
_CAN_STAY = (Life.READY, Life.DRAINING, Life.DRAINED)
Save = Callable[[DesiredState, int], Awaitable[bool]]
"""Writes a state if that version stands there; False = somebody was faster."""


class Rolling:
    """The steps of all rollouts of one cluster. It remembers what it wrote until that is the state."""

    def __init__(self, save: Save, events: EventSink) -> None:
        self._save, self._events = save, events
        self._written = 0
        self._trouble = ""

    async def step(
        self, state: DesiredState, seen: Sequence[Seen], held: Collection[WorkerId], broken: Mapping[WorkerId, str]
    ) -> bool:
        """Take the next step, if there is one; whether a rollout is on its way."""
        if state.version < self._written or not is_rolling(state):
            return state.version < self._written
        standings = [standing(one, state, is_held=one.worker_id in held) for one in seen]
        after = advanced(state, standings, broken)
        if after != state:
            await self._write(state, replace(after, version=state.version + 1))
        return any(one.phase is RolloutPhase.ROLLING for one in state.rollouts)

    async def _write(self, before: DesiredState, after: DesiredState) -> None:
        try:
            is_saved = await self._save(after, before.version)
        except TandemError as error:  # it is tried again at the next look
            if error.message != self._trouble:
                self._events.record(EventKind.ROLLOUT, "cluster", f"the next step is not written: {error.message}")
            self._trouble = error.message
            return
        self._trouble = ""
        if is_saved:
            self._written = after.version
            for model, text in _told(before, after):
                self._events.record(EventKind.ROLLOUT, model, text)


def is_rolling(state: DesiredState) -> bool:
    """Whether some rollout is not over."""
    return any(one.phase is not RolloutPhase.DONE for one in state.rollouts)


def standing(one: Seen, state: DesiredState, *, is_held: bool = False) -> Standing:
    """A worker that runs, as rollouts see it. `is_held`: it is left alone for now, and does not count."""
    member = state.member(one.worker_id)
    wanted = (member.role, state.revision_of(member), member.restart_generation) if member is not None else None
    is_as_wanted = (one.role, one.revision, one.restart_generation) == wanted
    return Standing(
        worker_id=one.worker_id,
        model=one.model,
        role=one.role,
        revision=one.revision,
        restart_generation=one.restart_generation,
        is_serving=is_as_wanted and one.life is Life.READY and not is_held,
        can_stay=one.life in _CAN_STAY,
    )


def _told(before: DesiredState, after: DesiredState) -> Iterator[tuple[str, str]]:
    """(model, what the step means), for people."""
    for rollout in after.rollouts:
        was = before.rollout(rollout.model)
        if was is None or was == rollout:
            yield from _told_of_members(before, after, rollout)
        elif rollout.phase is RolloutPhase.FAILED:
            yield rollout.model, f"to {rollout.revision}: stopped, as a worker of it does not work: {rollout.reason}"
        elif rollout.phase is RolloutPhase.DONE:
            yield rollout.model, f"to {rollout.revision}: done, nobody of {rollout.previous} is left"


def _told_of_members(before: DesiredState, after: DesiredState, rollout: Rollout) -> Iterator[tuple[str, str]]:
    here, there = ({member.worker_id: member for member in state.members} for state in (before, after))
    come = [name for name, member in there.items() if name not in here and _is_of(after, member, rollout)]
    go = [name for name, member in here.items() if name not in there and _is_of(before, member, rollout)]
    parts = [f"{', '.join(come)} to come"] if come else []
    parts += [f"{', '.join(go)} to leave"] if go else []
    if parts:
        yield rollout.model, f"to {rollout.revision}: {'; '.join(parts)}"


def _is_of(state: DesiredState, member: Member, rollout: Rollout) -> bool:
    return state.pool(member.pool).model == rollout.model
