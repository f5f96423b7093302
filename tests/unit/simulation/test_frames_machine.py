"""The sender's record and the receiver's intake alone, under lost, doubled, late, spoiled and foreign frames."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.unit.simulation.budget import budget
from tests.unit.simulation.frames import BLOCKS, Pair

NUMBERS = st.sampled_from([1, 2])
WHICH = st.integers(0, 30)


class Frames(RuleBasedStateMachine):
    """Rules are what can happen on a wire and at either end; `Pair.check` holds between any two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    @rule(
        number=NUMBERS, blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True),
        attempt=st.integers(1, 3),
    )  # fmt: skip
    def begin(self, number: int, blocks: list[int], attempt: int) -> None:
        self.pair.begin(number, tuple(blocks), attempt)

    @rule(which=WHICH, count=st.integers(1, 8))
    def send(self, which: int, count: int) -> None:
        for _ in range(count):
            self.pair.send(which)

    @rule(which=WHICH, count=st.integers(1, 8))
    def land(self, which: int, count: int) -> None:
        for _ in range(count):
            self.pair.land(which)
            self.pair.check()

    @rule(which=WHICH)
    def land_twice(self, which: int) -> None:
        self.pair.land(which, again=True)

    @rule(which=WHICH, count=st.integers(1, 4))
    def answer(self, which: int, count: int) -> None:
        for _ in range(count):
            self.pair.answer(which)

    @rule(which=WHICH)
    def lose(self, which: int) -> None:
        self.pair.lose(which)

    @rule(which=WHICH, bit=st.integers(0, 500))
    def flip(self, which: int, bit: int) -> None:
        self.pair.flip(which, bit)

    @rule(which=WHICH)
    def forge(self, which: int) -> None:
        self.pair.forge(which)

    @rule(which=WHICH)
    def withdraw(self, which: int) -> None:
        self.pair.withdraw(which)

    @rule(number=NUMBERS, how=st.sampled_from(["admit", "admit", "cancel", "cancel", "revoke"]))
    def end(self, number: int, how: str) -> None:
        self.pair.end(number, how)

    @rule(which=WHICH, what=st.sampled_from(["cancel", "cut", "receiver", "receiver", "sender", "sender"]))
    def trouble(self, which: int, what: str) -> None:
        if what == "cancel":
            self.pair.cancel_sending(which)
        elif what == "cut":
            self.pair.cut()
        elif what == "receiver":
            self.pair.receiver_begins_anew()
        else:
            self.pair.sender_begins_anew()

    @rule(number=NUMBERS, what=st.sampled_from(["attempt", "receiver", "sender"]))
    def replace(self, number: int, what: str) -> None:
        """A transfer is given up, and another one takes its number and its blocks while its frames still fly."""
        self.pair.replace(number, what)

    @invariant()
    def holds(self) -> None:
        self.pair.check()

    def teardown(self) -> None:
        self.pair.settle()


def test_every_history_of_frames() -> None:
    run_state_machine_as_test(Frames, settings=budget(examples=250, steps=40))
