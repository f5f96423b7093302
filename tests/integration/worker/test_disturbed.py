"""CI's slice of `make proof NAME=handover`: random trouble between two ranks."""

from pathlib import Path

import pytest

from proof.handover.disturbed import Ask, run_seed, undisturbed


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Ask, list[list[int]]]:
    return undisturbed(tmp_path_factory.mktemp("u"))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(3))
def test_answers_survive_trouble(seed: int, folder: Path, answers: dict[Ask, list[list[int]]]) -> None:
    outcome = run_seed(seed, folder, answers, "shm" if seed % 3 else "grpc")
    assert outcome.completed >= outcome.requests // 3
