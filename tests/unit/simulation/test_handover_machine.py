"""Two prefill and two decode workers and a router under every interleaving that hypothesis thinks of.

`make proof NAME=machines` runs the same machine for long.
"""

import random
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.unit.simulation.budget import budget
from tests.unit.simulation.router import Ask, Flight
from tests.unit.simulation.trouble import BREAKS, LOSSES, WAITS_S, Trouble
from tests.unit.simulation.world import ROLES, Plan, Sizes, World

ASKS = st.builds(
    Ask,
    tokens=st.sampled_from([1, 4, 5, 8, 13, 16, 24]),
    branch=st.integers(0, 2),
    max_tokens=st.sampled_from([1, 2, 3, 9]),
    n=st.sampled_from([1, 1, 1, 3]),
)
PLANS = st.tuples(st.sampled_from(["p0", "p0", "p1", None]), st.sampled_from(["d0", "d0", "d1"]))
TALLY: Counter[str] = Counter()
"""Counts of events over all examples of this process, for reports."""
NAMES = st.sampled_from(list(ROLES))
WHICH = st.integers(0, 60)
SIZES = st.builds(
    Sizes,
    prefill_blocks=st.sampled_from([9, 14, 30]),
    decode_blocks=st.sampled_from([8, 10, 24]),
    decode_block_tokens=st.sampled_from([2, 4, 4, 8]),
    groups=st.sampled_from([1, 1, 2]),
    max_payload_bytes=st.sampled_from([512, 1024, 8192]),
)
SOURCES = st.lists(NAMES, max_size=2, unique=True)


class Handover(RuleBasedStateMachine):
    """Rules are single events; `World.check` is what holds between any two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.trouble = Trouble(self.world)
        self.is_cancelled = False

    @initialize(sizes=SIZES, is_cancelled=st.booleans())
    def begin(self, sizes: Sizes, is_cancelled: bool) -> None:
        """`is_cancelled`: in the end all clients leave."""
        self.world.close()
        self.is_cancelled, self.world = is_cancelled, World(sizes)
        self.trouble = Trouble(self.world)

    # ---- what ought to happen ----------------------------------------------------------------------------------

    @rule(ask=ASKS, plan=PLANS, again=st.lists(st.one_of(st.none(), PLANS), max_size=3), sources=SOURCES)
    def submit(self, ask: Ask, plan: Plan, again: list[Plan | None], sources: list[str]) -> None:
        """`again`: where each failed attempt goes next; None and the end of the list give up."""
        flight = self.world.submit(ask, *plan, sources=sources)
        plans = iter(again)
        tries = self.world.retries

        def replan(failed: Flight) -> Plan | None:
            return next(plans, None)

        tries[flight.id] = replan

    @rule(name=NAMES, hold_back=st.sampled_from([0, 0, 0, 1, 2]))
    def turn(self, name: str, hold_back: int) -> None:
        self.world.turn(name, hold_back)

    @rule(count=st.integers(1, 40), seed=st.integers(0, 255))
    def go_on(self, count: int, seed: int) -> None:
        """Do one possible next thing after another, drawn by `seed`."""
        rng = random.Random(seed)
        for _ in range(count):
            rng.choice(self.world.enabled())()
            self.world.check()

    @rule(count=st.integers(1, 40), seed=st.integers(0, 255))
    def go_on_in_one_place(self, count: int, seed: int) -> None:
        """Do as `go_on`, but leave one worker, and all that leads there and away from it, behind."""
        rng = random.Random(seed)
        left_behind = rng.choice(list(ROLES))
        for _ in range(count):
            rng.choice(self.world.enabled(without=left_behind))()
            self.world.check()

    @rule(rounds=st.integers(1, 3))
    def let_run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.round()

    # ---- trouble -------------------------------------------------------------------------------------------------

    @rule(which=WHICH, how=st.sampled_from(["lose", "double", "late"]))
    def disturb(self, which: int, how: str) -> None:
        self.trouble.disturb(which, how)

    @rule(which=WHICH, how=st.sampled_from(["head", "payload", "truncate"]), where=st.integers(0, 4000))
    def spoil(self, which: int, how: str, where: int) -> None:
        self.trouble.spoil(which, how, where)

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        self.trouble.cancel(which)

    @rule(which=WHICH, choice=st.integers(0, 2))
    def end_choice(self, which: int, choice: int) -> None:
        self.trouble.end_choice(which, choice)

    @rule(which=WHICH)
    def plan_anew(self, which: int) -> None:
        self.trouble.plan_anew(which)

    @rule(seconds=st.sampled_from(WAITS_S))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(which=WHICH, what=st.sampled_from(BREAKS))
    def break_link(self, which: int, what: str) -> None:
        self.trouble.break_link(which, what)

    @rule(name=NAMES, what=st.sampled_from(LOSSES))
    def lose_worker(self, name: str, what: str) -> None:
        self.trouble.lose_worker(name, what)

    # ---- promises ------------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        try:
            self.world.settle(by_cancel=self.is_cancelled)
            self.world.prove_alive()
        finally:
            self.world.close()
            TALLY.update(self.world.tally)
            TALLY.update(flight.outcome for flight in self.world.router.flights.values())


def test_every_interleaving() -> None:
    run_state_machine_as_test(Handover, settings=budget(examples=80, steps=40))
