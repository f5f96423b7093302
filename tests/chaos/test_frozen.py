"""Workers that stand still, are given up and wake up, on a registry that is as it was, empty, or older than they are.

All of it, and how long it takes: `make proof NAME=frozen`.
"""

from collections.abc import Iterator

import pytest

from tests.chaos.frozen import Cell, FrozenScene, frozen_scene

TRIES = 4
"""The observed activity may be over before the worker stands still."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrozenScene]:
    with frozen_scene(tmp_path_factory.mktemp("frozen"), seed=6) as scene:
        yield scene


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "cell",
    [
        Cell("prefill", "at work", "old dump"),
        Cell("decode", "at work", "emptied"),
        Cell("decode", "idle", "old dump"),
        Cell("prefill", "idle", "old files"),
    ],
    ids=str,
)
def test_who_wakes_up_is_somebody_else(scene: FrozenScene, cell: Cell) -> None:
    for _ in range(TRIES):
        found = scene.freeze(cell)
        print(f"{cell}: {found}")
        if found.reattempts > 0 or cell.moment == "idle":
            return
    pytest.fail(f"nobody was hit in {TRIES} tries")


def test_the_dead_are_not_asked(scene: FrozenScene) -> None:
    print(f"out of rotation after {scene.kill('decode', 'host'):.2f} s")
