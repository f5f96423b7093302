"""The search for the highest rate, and the figures of a run."""

from __future__ import annotations

import pytest

from tandem.controlplane.simulator.capacity import highest_factor
from tandem.controlplane.simulator.summary import quantile


@pytest.mark.parametrize("limit", [0.37, 1.0, 3.3, 40.0])
@pytest.mark.parametrize("start", [1.0, 8.0])
def test_the_highest_factor_is_found_from_either_side(limit: float, start: float) -> None:
    asked: list[float] = []

    def share(factor: float) -> float:
        asked.append(factor)
        return 0.0 if factor <= limit else 0.5

    found = highest_factor(share, start=start, precision=0.01)
    assert limit / 1.01 <= found <= limit
    assert len(asked) < 20


def test_what_never_keeps_up_is_an_error() -> None:
    with pytest.raises(ValueError, match="not even"):
        highest_factor(lambda _: 1.0)


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5) == 3.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert quantile([7.0], 0.99) == 7.0
