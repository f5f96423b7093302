"""A slice of `make proof NAME=nodes`: two machines, one of which dies, and Ray's head after it."""

from __future__ import annotations

from proof.nodes.__main__ import Draw, play


def test_machines_and_the_head_die_under_load() -> None:
    steps = play(Draw(), seed=3, is_short=True)
    assert [step["step"] for step in steps] == [
        "scaled from 1:1 to 2:4",
        "a machine died",
        "a machine joined",
        "the head died",
        "scaled from 2:4 to 3:1",
        "the other machine left",
    ]
