"""Tickets of one decode worker before a crowd: order, shares, revocation, and no request left waiting."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.unit.simulation.budget import budget
from tests.unit.simulation.crowd import MAX_SEQUENCES, PEERS, Crowd, Wish

TOKENS = st.sampled_from([3, 8, 12, 20, 28])
WHICH = st.integers(0, 20)


class Tickets(RuleBasedStateMachine):
    """Every promise is judged inside `Crowd.turn`."""

    @initialize(blocks=st.sampled_from([10, 16, 32]))
    def start(self, blocks: int) -> None:
        self.crowd = Crowd(blocks)

    @rule(
        peer=st.sampled_from(PEERS), tokens=TOKENS, halves=st.sampled_from(["both", "both", "both", "router", "peer"]),
        count=st.integers(1, 3),
    )  # fmt: skip
    def wish(self, peer: str, tokens: int, halves: str, count: int) -> None:
        for _ in range(count):
            if len(self.crowd.wishes) < 25:
                self.crowd.wish(peer, tokens, is_announced=halves != "peer", is_asked=halves != "router")

    @rule(which=WHICH)
    def other_half(self, which: int) -> None:
        wish = self._one(which, of=[x for x in self._open() if not x.is_announced or not x.asked])
        if wish is not None:
            self.crowd.announce(wish)
            self.crowd.ask(wish)

    @rule(which=WHICH, frames=st.sampled_from([1, 2, 3, 100]), is_complete=st.booleans())
    def push(self, which: int, frames: int, is_complete: bool) -> None:
        wish = self._one(which, of=[x for x in self._open() if x.ticket is not None])
        if wish is not None:
            self.crowd.push(wish, frames)
            if is_complete:
                self.crowd.complete(wish)

    @rule(which=WHICH, by=st.sampled_from(["router", "peer"]))
    def end(self, which: int, by: str) -> None:
        wish = self._one(which, of=self._open())
        if wish is not None:
            (self.crowd.cancel if by == "router" else self.crowd.give_up)(wish)

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.1, 1.1]), times=st.integers(1, 4))
    def turn(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.crowd.turn(seconds)

    def teardown(self) -> None:
        if hasattr(self, "crowd"):
            try:
                self.crowd.settle()
            finally:
                self.crowd.close()

    def _open(self) -> list[Wish]:
        return [wish for wish in self.crowd.wishes.values() if not wish.is_over]

    def _one(self, which: int, of: list[Wish]) -> Wish | None:
        return of[which % len(of)] if of else None


def test_every_crowd_is_served() -> None:
    run_state_machine_as_test(Tickets, settings=budget(examples=100, steps=40))


def test_no_more_are_admitted_than_get_a_token_a_step() -> None:
    """Blocks for all of them, but not turns: the others wait for tickets, and once admitted for nothing."""
    crowd = Crowd(blocks=200, max_tokens=12)
    for number in range(3 * MAX_SEQUENCES):
        crowd.wish(PEERS[number % len(PEERS)], 3)
    granted = [wish for wish in crowd.wishes.values() if wish.ticket is not None]
    assert len(granted) == MAX_SEQUENCES
    crowd.settle()
    crowd.close()
