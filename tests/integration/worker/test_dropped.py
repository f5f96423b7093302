"""Dropped objects give their memory back: engines, hosts and routers, made and dropped 20 times in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.worker import drop_program

ROOT = Path(__file__).resolve().parents[3]
WARM, ROUNDS = 8, 20
GROWTH_MIB = 24
"""Of all rounds after the first: a pair of engines that keeps its weights grows by 40 a round."""


@pytest.mark.parametrize("kind", drop_program.KINDS)
def test_20_of_a_kind_take_no_more_than_a_few(kind: str) -> None:
    program = [sys.executable, "-m", drop_program.__name__, kind, str(ROUNDS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    resident = json.loads(done.stdout)
    assert len(resident) == ROUNDS
    assert resident[-1] - resident[WARM] < GROWTH_MIB, resident
