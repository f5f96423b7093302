"""Updates the record from the pods, before a controller polls their workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from tandem.controlplane.kubernetes.adoption import Homes, Sight, adopted, wanted
from tandem.controlplane.kubernetes.launcher import KubernetesLauncher
from tandem.core.desired import DesiredState
from tandem.core.errors import TandemError
from tandem.core.events import EventKind, EventSink
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

Save = Callable[[DesiredState, int], Awaitable[bool]]
"""Writes a state if the stored version is that one; False = it was changed concurrently."""


class PodFollowing:
    """The controller's `PodFollower` for Kubernetes. `registered`: registered workers with their roles."""

    def __init__(
        self,
        launcher: KubernetesLauncher,
        homes: Homes,
        registered: Callable[[], Mapping[WorkerId, RoleName]],
        save: Save,
        events: EventSink,
    ) -> None:
        self._launcher, self._homes, self._registered = launcher, homes, registered
        self._save, self._events = save, events
        self._trouble = ""

    async def followed(self, state: DesiredState) -> DesiredState:
        """Return `state` with only those members that have a pod: pods to come are the launcher's task."""
        if not self._launcher.is_listed:
            return replace(state, members=())
        await self._adopt(state)
        seen = self._sight(state)
        found = wanted(state, seen, self._homes)
        self._launcher.want(found, seen.registered)
        return replace(state, members=tuple(each for each in state.members if each.worker_id in found.members))

    async def _adopt(self, state: DesiredState) -> None:
        after = adopted(state, self._sight(state), self._homes)
        if after.state == state:
            return
        try:
            is_saved = await self._save(replace(after.state, version=state.version + 1), state.version)
        except TandemError as error:  # it is tried again at the next look
            if error.message != self._trouble:
                self._events.record(
                    EventKind.ADOPTED, "cluster", f"what pods there are is not written: {error.message}"
                )
            self._trouble = error.message
            return
        self._trouble = ""
        if is_saved:
            there = {pod.name for pod in self._launcher.pods}
            new = (member.worker_id for member in after.state.members if member.worker_id in there)
            self._launcher.note_members(new, state.version + 1)
            for subject, why in after.told:
                self._events.record(EventKind.ADOPTED, subject, why)

    def _sight(self, state: DesiredState) -> Sight:
        replicas = self._launcher.replicas(state.version)
        return Sight(
            pods=self._launcher.pods,
            registered=self._registered(),
            replicas=replicas,
            taken=self._launcher.taken,
        )
