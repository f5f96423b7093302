"""A world for tests of what a controller does next: everything takes its time, and controllers die all the while."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tandem.controlplane.reconcile import Action, ActionKind, ObservedPhase, ObservedWorker, plan
from tandem.controlplane.rollout_controller import standing
from tandem.core.desired import DesiredState, Pool, RolloutPhase
from tandem.core.desired_changes import cordoned, restarted, with_role, with_scale
from tandem.core.errors import ConflictError
from tandem.core.ids import WorkerId
from tandem.core.rollouts import advanced, paused, resumed, started, undone
from tandem.core.state_enums import RoleName

P, D, M = RoleName.PREFILL, RoleName.DECODE, RoleName.MIXED
BAD = "bad"
"""A revision with workers that cannot start."""


def wanted(*, prefill: int = 0, decode: int = 0, mixed: int = 0, max_ranks: int = 0) -> DesiredState:
    counts = {P: prefill, D: decode, M: mixed}
    pools = tuple(Pool(name=role.value, model="m", role=role, count=count) for role, count in counts.items())
    return DesiredState(version=1, pools=pools, max_ranks=max_ranks).filled()


@dataclass
class World:
    """Workers that obey, some time after an order. It checks the invariants at every moment."""

    rng: random.Random
    max_ranks: int
    workers: dict[WorkerId, ObservedWorker] = field(default_factory=dict)
    broken: dict[WorkerId, str] = field(default_factory=dict)
    served: bool = False

    def take(self, action: Action, state: DesiredState) -> None:
        name = action.worker_id
        if action.deed is ActionKind.START:
            assert name not in self.workers
            assert action.member is not None
            revision = state.revision_of(action.member)
            if revision == BAD:
                self.broken[name] = "it has no such file"
                return
            self.workers[name] = ObservedWorker(
                worker_id=name, model="m", role=action.member.role, life=ObservedPhase.STARTING, revision=revision,
                restart_generation=action.member.restart_generation,
            )  # fmt: skip
            assert not self.max_ranks or len(self.workers) <= self.max_ranks, "more ranks than there may be"
        elif action.deed is ActionKind.STOP:
            assert self.workers[name].life is not ObservedPhase.READY, "a worker was stopped while it had work"
            self._set(name, ObservedPhase.STOPPING)
        elif action.deed is ActionKind.UNCORDON:
            self._set(name, ObservedPhase.READY)
        else:
            self._set(name, ObservedPhase.DRAINING)
            if action.deed is ActionKind.BECOME:
                assert action.member is not None
                self._become(name, action.member.role)
        self._check()

    def _become(self, name: WorkerId, role: RoleName) -> None:
        is_undone = self.workers[name].role is role
        life, target = (ObservedPhase.READY, None) if is_undone else (ObservedPhase.FLIPPING, role)
        self.workers[name] = replace(self.workers[name], life=life, target=target)

    def pass_time(self) -> None:
        """Something that is under way comes to its end."""
        ends: dict[ObservedPhase, Callable[[WorkerId], None]] = {
            ObservedPhase.STARTING: lambda name: self._set(name, ObservedPhase.READY),
            ObservedPhase.DRAINING: lambda name: self._set(name, ObservedPhase.DRAINED),
            ObservedPhase.STOPPING: self._end,
            ObservedPhase.FLIPPING: self._flip,
        }
        moving = sorted(name for name, one in self.workers.items() if one.life in ends)
        if moving:
            name = self.rng.choice(moving)
            ends[self.workers[name].life](name)
        self._check()

    @property
    def is_moving(self) -> bool:
        return any(
            one.life in (ObservedPhase.STARTING, ObservedPhase.DRAINING, ObservedPhase.STOPPING, ObservedPhase.FLIPPING)
            for one in self.workers.values()
        )

    def ready(self, role: RoleName) -> int:
        return sum(one.life is ObservedPhase.READY and one.role is role for one in self.workers.values())

    def _end(self, name: WorkerId) -> None:
        del self.workers[name]

    def _flip(self, name: WorkerId) -> None:
        """End a flip; it fails now and then, and the worker goes back to its old role."""
        one = self.workers[name]
        role = one.target if one.target is not None and self.rng.random() < 0.8 else one.role
        self.workers[name] = replace(one, role=role, life=ObservedPhase.READY, target=None)

    def _set(self, name: WorkerId, life: ObservedPhase) -> None:
        self.workers[name] = replace(self.workers[name], life=life)

    def _check(self) -> None:
        """Only workers of one revision serve a request together."""
        ready: dict[str, set[RoleName]] = {}
        for one in self.workers.values():
            if one.life is ObservedPhase.READY:
                ready.setdefault(one.revision, set()).add(one.role)
        serves = any(M in roles or {P, D} <= roles for roles in ready.values())
        assert serves or not self.served, "nobody serves any more"
        self.served = self.served or serves


def step(state: DesiredState, world: World, *, most: int | None = None) -> tuple[DesiredState, bool]:
    """One look of a controller that dies after `most` actions: the state after it, and whether it did anything."""
    seen = sorted(world.workers.values(), key=lambda one: world.rng.random())
    made = plan(state, seen, held=world.broken)
    for action in made.actions[:most]:
        world.take(action, state)
    after = advanced(state, [standing(one, state) for one in world.workers.values()], world.broken)
    if after != state:
        after.validate()
        world.broken = {}  # as a controller tries them again
    return after, bool(made.actions) or after != state


def settle(state: DesiredState, world: World, *, dies_every_time: bool) -> tuple[DesiredState, set[WorkerId]]:
    """Run a controller that dies after each single action, or one that does all that it planned. Return the record,
    which rollouts change, and the workers that differ from it in the end, which the last plan has to name."""
    for _ in range(4000):
        state, is_news = step(state, world, most=1 if dies_every_time else None)
        if not is_news and not world.is_moving:
            break
        world.pass_time()
    found = {
        name: (one.role, one.life is ObservedPhase.DRAINED, one.restart_generation, one.revision)
        for name, one in world.workers.items()
    }
    expected = {
        member.worker_id: (member.role, member.is_cordoned, member.restart_generation, state.revision_of(member))
        for member in state.members
        if member.worker_id not in world.broken
    }
    differing = {name for name in {*found, *expected} if found.get(name) != expected.get(name)}
    made = plan(state, list(world.workers.values()), held=world.broken)
    assert differing == set(made.waits)
    return state, differing


def wish(state: DesiredState, rng: random.Random) -> DesiredState:
    """Make a random change of the desired state; the same state again where it is not allowed."""
    name = rng.choice(state.members).worker_id
    made: list[Callable[[], DesiredState]] = [
        lambda: with_scale(state, {P: rng.randint(0, 4), D: rng.randint(0, 4)}, {}, may_flip=rng.random() < 0.5),
        lambda: with_scale(state, {M: rng.randint(0, 2)}, {}),
        lambda: with_role(state, name, rng.choice((P, D, M))),
        lambda: cordoned(state, name, is_cordoned=rng.random() < 0.4),
        lambda: restarted(state, name),
        lambda: rolled_out(state, rng),
        lambda: rolled_out(state, rng),
        lambda: rng.choice((paused, resumed, undone))(state),
        lambda: undone(state),
    ]
    try:
        return rng.choice(made)()
    except ConflictError:
        return state


def rolled_out(state: DesiredState, rng: random.Random) -> DesiredState:
    surge, unavailable = rng.choice(((1, 0), (0, 1), (1, 1), (2, 1), (3, 0)))
    name = rng.choice(("one", "two", "three", BAD))
    return started(state, name=name, max_surge=surge, max_unavailable=unavailable)


def sizes(state: DesiredState) -> Counter[RoleName]:
    """Workers wanted by role, those that come for a rollout left out."""
    rollout = state.under_way("m")
    return Counter(
        {pool.role: rollout.sizes.get(pool.name, 0) if rollout else pool.count for pool in state.pools if pool.count}
    )


def is_over(state: DesiredState) -> bool:
    return all(one.phase is RolloutPhase.DONE for one in state.rollouts)
