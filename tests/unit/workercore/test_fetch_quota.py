"""One peer's share of the pools while others wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.workercore.fetch_quota import is_over

blocks = st.integers(0, 60)


def test_a_quarter_or_one_request() -> None:
    assert not is_over([0], [99], [100]), "one request, however large"
    assert not is_over([20], [5], [100])
    assert is_over([20], [6], [100])
    assert is_over([20, 1], [5, 5], [100, 20]), "in every group"


@given(st.lists(st.tuples(blocks, st.integers(1, 60), st.integers(1, 200)), min_size=1, max_size=3))
def test_granted_in_turn_a_peer_keeps_to_its_share(groups: list[tuple[int, int, int]]) -> None:
    """All fetches granted one after another: a quarter of every pool, or a single request."""
    _, needs, pools = (list(column) for column in zip(*groups, strict=True))
    held, granted = [0] * len(needs), 0
    while not is_over(held, needs, pools) and granted < 100:
        held = [have + need for have, need in zip(held, needs, strict=True)]
        granted += 1
    assert granted >= 1
    assert granted == 1 or granted == 100 or all(have <= size // 4 for have, size in zip(held, pools, strict=True))
