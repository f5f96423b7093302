"""A long random walk through a world: the same events as the hypothesis machine, denser, drawn from one seed."""

import random
from collections import Counter

from tests.unit.simulation.router import Ask, Flight
from tests.unit.simulation.trouble import BREAKS, LOSSES, WAITS_S, Trouble
from tests.unit.simulation.world import ROLES, Plan, Sizes, World

WEIGHTS = {
    "disturb": 6, "spoil": 3, "cancel": 3, "plan_anew": 2, "wait": 2, "break_link": 4, "lose_worker": 3,
}  # fmt: skip
"""Faults, and their frequency compared with the rest."""
TOKENS = (1, 4, 5, 8, 13, 16, 24)


class Walk:
    """One seed. `run` raises AssertionError at the first broken promise."""

    def __init__(self, seed: int, weights: dict[str, int] | None = None) -> None:
        """`weights`: other than `WEIGHTS`."""
        self._weights = weights or WEIGHTS
        self._rng = rng = random.Random(seed)
        self.world = World(
            Sizes(
                prefill_blocks=rng.choice([12, 16, 40]), decode_blocks=rng.choice([10, 14, 24]),
                groups=rng.choice([1, 1, 2]), max_payload_bytes=rng.choice([512, 1024, 8192]),
                decode_block_tokens=rng.choice([2, 4, 4, 8]),
            )
        )  # fmt: skip
        self._trouble = Trouble(self.world)
        self._trouble_chance = rng.choice([0.01, 0.03, 0.1])
        self._patience = rng.choice([0, 1, 3])

    def run(self, events: int) -> Counter[str]:
        """Run so many single events, then quiet; return the counts of events."""
        try:
            for _ in range(events):
                self._event()
                self.world.check()
            self.world.settle(by_cancel=self._rng.random() < 0.5)
            self.world.prove_alive()
        finally:
            self.world.close()
        tally = self.world.tally
        tally["requests"] = len(self.world.router.flights)
        tally["attempts"] = sum(flight.attempt for flight in self.world.router.flights.values())
        tally.update(flight.outcome for flight in self.world.router.flights.values())
        return tally

    def _event(self) -> None:
        rng, world = self._rng, self.world
        if len(world.router.running) < 6 and rng.random() < 0.05:
            self._submit()
        elif rng.random() < self._trouble_chance:
            self._go_wrong()
        elif rng.random() < 0.1:
            world.clock.advance(rng.choice([0.001, 0.02, 0.2]))
        elif rng.random() < 0.1:
            world.turn(rng.choice(list(ROLES)), hold_back=rng.randint(1, 3))
        else:
            rng.choice(world.enabled())()

    def _submit(self) -> None:
        rng = self._rng
        ask = Ask(
            tokens=rng.choice(TOKENS), branch=rng.randrange(3), max_tokens=rng.choice([1, 2, 3, 9]),
            n=rng.choice([1, 1, 1, 3]),
        )  # fmt: skip
        sources = rng.sample(list(ROLES), rng.choice([0, 0, 1, 2]))
        flight = self.world.submit(ask, *self._plan(), sources=sources)

        def retry(failed: Flight) -> Plan | None:
            return self._plan() if failed.attempt <= self._patience else None

        self.world.retries[flight.id] = retry

    def _plan(self) -> Plan:
        rng = self._rng
        return rng.choice(["p0", "p0", "p1", "p1", None]), rng.choice(["d0", "d0", "d1"])

    def _go_wrong(self) -> None:
        rng, trouble, which = self._rng, self._trouble, self._rng.randrange(100)
        kind = rng.choices(list(self._weights), list(self._weights.values()))[0]
        if kind == "disturb":
            trouble.disturb(which, rng.choice(["lose", "double", "late"]))
        elif kind == "spoil":
            trouble.spoil(which, rng.choice(["head", "payload", "payload", "truncate"]), rng.randrange(4000))
        elif kind == "cancel":
            trouble.cancel(which)
        elif kind == "plan_anew":
            trouble.plan_anew(which)
        elif kind == "wait":
            self.world.clock.advance(rng.choice(WAITS_S))
        elif kind == "break_link":
            trouble.break_link(which, rng.choice(BREAKS))
        else:
            trouble.lose_worker(rng.choice(list(ROLES)), rng.choice(LOSSES))
