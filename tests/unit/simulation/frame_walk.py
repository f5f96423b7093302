"""A random walk over one pair of ends: the same events as the hypothesis machine, denser, drawn from one seed."""

import random

from tests.unit.simulation.frames import BLOCKS, Pair


def frame_walk(seed: int, events: int) -> Pair:
    """Run so many events, then quiet. Raises AssertionError at the first broken promise."""
    rng, pair = random.Random(seed), Pair()
    for _ in range(events):
        _event(rng, pair)
        pair.check()
    pair.settle()
    return pair


def _event(rng: random.Random, pair: Pair) -> None:
    which, number = rng.randrange(100), rng.choice([1, 2])
    kind = rng.choices(
        ["begin", "send", "land", "again", "answer", "lose", "flip", "end", "replace", "trouble", "forge", "withdraw"],
        [6, 20, 14, 3, 6, 1, 1, 4, 3, 1, 1, 1],
    )[0]
    if kind == "begin":
        pair.begin(number, tuple(rng.sample(range(BLOCKS), rng.randint(1, 3))), rng.randint(1, 3))
    elif kind == "send":
        pair.send(which)
    elif kind in ("land", "again"):
        pair.land(which, again=kind == "again")
    elif kind == "answer":
        pair.answer(which)
    elif kind == "lose":
        pair.lose(which)
    elif kind == "flip":
        pair.flip(which, rng.randrange(500))
    elif kind == "forge":
        pair.forge(which)
    elif kind == "withdraw":
        pair.withdraw(which)
    elif kind == "end":
        pair.end(number, rng.choice(["admit", "admit", "cancel", "revoke"]))
    elif kind == "replace":
        pair.replace(number, rng.choice(["attempt", "receiver", "sender"]))
    else:
        rng.choice([pair.cut, pair.receiver_begins_anew, pair.sender_begins_anew])()
