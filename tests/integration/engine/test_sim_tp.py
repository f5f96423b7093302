"""A simulated model over several ranks on gloo: the tokens of one rank, and every rank's heads count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, ["2:-1", "2:0", "2:1", "4:-1", "1:-1", "1:1"]), (4, ["4:-1", "4:2", "2:-1", "2:3", "8:-1"])],
)
def test_ranks_agree_with_the_oracle(tmp_path: Path, size: int, cases: list[str]) -> None:
    """With fewer heads than ranks, heads are repeated: counted once, but each copy is looked at."""
    command = [sys.executable, "-m", "tests.integration.engine.sim_program", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), *cases], cwd=ROOT, text=True, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)
