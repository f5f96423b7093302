"""CI's slice of the other part of `make proof NAME=grammars`: hostile grammars sent beside an honest client."""

from proof.grammars import beside
from proof.grammars.inputs import Inputs


def test_hostile_grammars_end_in_an_answer_or_a_refusal_beside_a_stream() -> None:
    inputs = Inputs(5, None)
    found = beside.run(inputs, range(10))
    # How much later tokens come is for the proof on a quiet machine: tests run beside others.
    assert [why for why in found["broken"] if not why.startswith("p99")] == []
    assert set(found["ends"]) == {"200", "400"}
    assert sum(found["ends"].values()) == 10
    assert found["hostile"]["tokens"] > 100


def test_what_breaks_a_promise_is_said() -> None:
    gaps = {"p99_ms": 9.0, "median_ms": 3.0}
    found = {"plain": gaps, "hostile": gaps, "mib": {"router": [100, 150]}}
    assert beside.wrongs(found, {1: 200, 2: 400}) == []
    assert beside.wrongs(found, {1: 500, 2: 0}) == ["input 1 ended with status 500", "input 2 ended with status 0"]
    late = {**found, "hostile": {"p99_ms": 12.5, "median_ms": 3.0}, "mib": {"router": [100, 900]}}
    assert beside.wrongs(late, {}) == [
        "p99 between tokens is 12.5 ms, 9.0 ms beside plain requests", "router grew from 100 to 900 MiB",
    ]  # fmt: skip
