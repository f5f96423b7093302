"""Makes the desired state follow pods that come and go by themselves: a pure function of record and observed state.

A member is one of two things. It is named like a pod: that pod is its worker. Or it is a vacancy, named like any new
worker (`decode-3`): a pod is still to come, from the Deployment of that name's pool. A pod that is registered fills a
vacancy, or is added when the scale was raised from outside. A member that lost its pod becomes a vacancy, as another
pod comes in its place, or is removed when the scale was lowered from outside.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.controlplane.kubernetes.pods import WorkerPod, staying
from tandem.core.desired import DesiredState, DesiredWorker
from tandem.core.desired_changes import with_members
from tandem.core.errors import ConfigError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A pool of the chart: the Deployment of pods that start in `role`, with `ranks` each. `is_scaled_here` False: an
    autoscaler owns its scale, and the record only follows."""

    pool: str
    role: RoleName
    deployment: str
    ranks: int = 1
    is_scaled_here: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The state observed at one moment. `registered`: registered workers with their roles. `replicas`: by pool of the
    chart, the pods that its Deployment is to have; only where that was read after the last change of its pods. `taken`:
    workers that left as a victim named by a controller."""

    pods: Sequence[WorkerPod]
    registered: Mapping[WorkerId, RoleName]
    replicas: Mapping[str, int]
    taken: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """The record as it should be, and (worker, why) for each change."""

    state: DesiredState
    told: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTargets:
    """Pods that a version of the record wants. By pool of the chart: `vacancies`, pods that are still to come, and
    `missing`, members without a pod while it is not known yet whether another one comes."""

    version: int = 0
    members: frozenset[WorkerId] = frozenset()
    vacancies: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)


class Homes:
    """The pools of the chart, one a role."""

    def __init__(self, homes: Sequence[Home]) -> None:
        self.all = tuple(homes)
        self._by_pool = {home.pool: home for home in homes}
        self._by_role = {home.role: home for home in homes}

    def of_pod(self, pod: WorkerPod) -> Home | None:
        return self._by_pool.get(pod.pool)

    def of_role(self, role: RoleName) -> Home | None:
        return self._by_role.get(role)

    def by_name(self, name: str) -> Home | None:
        """Return the pool of a pod with that name, there or gone."""
        fitting = [home for home in self.all if name.startswith(f"{home.deployment}-")]
        return max(fitting, key=lambda home: len(home.deployment), default=None)

    def of_vacancy(self, state: DesiredState, member: DesiredWorker) -> Home | None:
        """Return where its pod has to come from: a vacancy after a change of role keeps its old home in its name."""
        named = member.worker_id.rpartition("-")[0]
        pool = next((pool for pool in state.pools if pool.name == named), None) or state.pool(member.pool)
        return self.of_role(pool.role)


def adopted(state: DesiredState, sight: Sight, homes: Homes) -> Adopted:
    """Return the record updated to the observed state; the same record where nothing has changed."""
    draft = _RecordDraft(state, sight, homes)
    draft.forget_the_gone()
    draft.leave_to_autoscalers()
    draft.fill_and_add()
    return Adopted(state=draft.state, told=tuple(draft.told))


def wanted(state: DesiredState, sight: Sight, homes: Homes) -> PodTargets:
    """Return what the record wants of pods, as it stands."""
    there = {pod.name for pod in staying(sight.pods)}
    vacancies: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for member in state.members:
        home = homes.by_name(member.worker_id)
        if member.worker_id in there:
            continue
        if home is not None:
            missing[home.pool] += 1
        elif (home := homes.of_vacancy(state, member)) is not None:
            vacancies[home.pool] += 1
    members = frozenset(member.worker_id for member in state.members if member.worker_id in there)
    return PodTargets(version=state.version, members=members, vacancies=dict(vacancies), missing=dict(missing))


class _RecordDraft:
    """A record that is being changed; a change after which no request could be served is not made."""

    def __init__(self, state: DesiredState, sight: Sight, homes: Homes) -> None:
        self.state, self._sight, self._homes = state, sight, homes
        self.told: list[tuple[str, str]] = []
        self._live = {pod.name: pod for pod in staying(sight.pods)}

    def forget_the_gone(self) -> None:
        for home in self._homes.all:
            gone = self._gone(home)
            lowered = self._lowered_by(home, gone)
            for member in gone:
                if lowered is None:
                    break
                is_too_much = lowered > 0 and not self._is_from_here(member)
                if is_too_much and self._put(member, None, "wanted no more: its pool was scaled down"):
                    lowered -= 1
                else:
                    self._put(member, self._vacancy(member, home), "its pod is gone, and another one is to come")

    def leave_to_autoscalers(self) -> None:
        for member in self.state.members:
            pod = self._live.get(member.worker_id)
            is_vacancy = pod is None and self._homes.by_name(member.worker_id) is None
            home = self._homes.of_vacancy(self.state, member) if is_vacancy else None
            home = self._homes.of_pod(pod) if pod is not None else home
            if home is None or home.is_scaled_here:
                continue
            if is_vacancy:
                self._put(member, None, f"an autoscaler decides how many there are in {home.deployment}")
            elif member.restart_generation:
                why = f"not started anew: an autoscaler owns the scale of {home.deployment}; delete the pod instead"
                self._put(member, replace(member, restart_generation=0), why)

    def fill_and_add(self) -> None:
        waiting = [pod for pod in self._live.values() if self._can_come(pod)]
        for pod in sorted(waiting, key=lambda pod: (pod.was_member(self.state.version), pod.name)):
            role, home = self._sight.registered[pod.name], self._homes.of_pod(pod)
            vacancies = [member for member in self.state.members if self._is_vacancy(member)]
            here = [member for member in vacancies if self._homes.of_vacancy(self.state, member) is home]
            here.sort(key=lambda member: (member.role is not role, member.worker_id))
            if here:
                vacancy = here[0]
                filled = DesiredWorker(worker_id=pod.name, pool=vacancy.pool, role=vacancy.role, revision=pod.revision)
                self._put(vacancy, filled, f"it takes the place of {vacancy.worker_id}", of=pod.name)
            elif home is not None and self._is_on_top(pod, home):
                pool = next((pool for pool in self.state.pools if pool.role is role), None)
                if pool is not None:
                    new = DesiredWorker(worker_id=pod.name, pool=pool.name, role=role, revision=pod.revision)
                    self._put(None, new, f"it came by itself, as {role}", of=pod.name)

    # ---- below -----------------------------------------------------------------------------------------------------

    def _gone(self, home: Home) -> list[DesiredWorker]:
        """Return the members that lost their pods of that pool."""
        members = [member for member in self.state.members if member.worker_id not in self._live]
        return [member for member in members if self._homes.by_name(member.worker_id) is home]

    def _is_vacancy(self, member: DesiredWorker) -> bool:
        return member.worker_id not in self._live and self._homes.by_name(member.worker_id) is None

    def _can_come(self, pod: WorkerPod) -> bool:
        return pod.name in self._sight.registered and not pod.is_victim and self.state.member(pod.name) is None

    def _is_on_top(self, pod: WorkerPod, home: Home) -> bool:
        """True if it is an additional pod: neither one no longer wanted nor, as far as is known, another's successor.
        Where the scale is ours, by pods listed after this version of the record was read: a mark may come late."""
        if home.is_scaled_here and home.pool not in self._sight.replicas:
            return False
        return not self._gone(home) and not (pod.was_member(self.state.version) and home.is_scaled_here)

    def _lowered_by(self, home: Home, gone: Sequence[DesiredWorker]) -> int | None:
        """Return by how many the wanted pods are fewer than the members were; None = not known yet. Members with pods
        removed by a controller do not count."""
        count = sum(not self._is_from_here(member) for member in gone)
        if not home.is_scaled_here:
            return count
        replicas = self._sight.replicas.get(home.pool)
        if replicas is None:
            return None
        here = [pod for pod in self._live.values() if pod.pool == home.pool and not pod.is_victim]
        return sum(self.state.member(pod.name) is not None for pod in here) + count - replicas

    def _is_from_here(self, member: DesiredWorker) -> bool:
        """True if a controller ended its pod: to replace it, or as a victim, which another controller took for one that
        stays before it saw the mark."""
        return bool(member.restart_generation) or member.worker_id in self._sight.taken

    def _vacancy(self, member: DesiredWorker, home: Home) -> DesiredWorker:
        own = next((pool.name for pool in self.state.pools if pool.role is home.role), member.pool)
        taken = {each.worker_id for each in self.state.members}
        name = next(name for number in itertools.count() if (name := WorkerId(f"{own}-{number}")) not in taken)
        return DesiredWorker(worker_id=name, pool=member.pool, role=member.role)

    def _put(self, old: DesiredWorker | None, new: DesiredWorker | None, why: str, *, of: str = "") -> bool:
        """Put `new` in the place of `old`; False if the record cannot be so. A replacement changes no numbers."""
        both = [new if each is old else each for each in self.state.members]
        both += [new] if old is None else []
        after = with_members(self.state, [each for each in both if each is not None])
        if old is None or new is None:
            try:
                after.validate()
            except ConfigError:
                return False
        self.state = after
        self.told.append((of or (old.worker_id if old is not None else ""), why))
        return True
