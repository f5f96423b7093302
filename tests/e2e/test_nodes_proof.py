"""A slice of `make proof NAME=nodes`: two machines, one of which dies, and Ray's head after it."""

import pytest

from proof.nodes.__main__ import Draw, play
from tools.namespaces import NoNamespacesError, look_for_namespaces


@pytest.mark.timeout(900)
@pytest.mark.drawn(1, of="long scenes")
def test_machines_and_the_head_die_under_load() -> None:
    try:
        look_for_namespaces()
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces for this user: {error}")
    steps = play(Draw(), seed=3, is_short=True)
    assert [step["step"] for step in steps] == [
        "scaled from 1:1 to 2:4",
        "a machine died",
        "a machine joined",
        "the head died",
        "scaled from 2:4 to 3:1",
        "the other machine left",
    ]
