"""One seed a run, for random input and drawn matrices: that of the commit, or the one that `--seed` names.

The same commit draws the same cases on every machine, and the next commit draws others. The summary of each run names
the seed, and with it a failure is repeated.
"""

import os
import subprocess
from pathlib import Path

import hypothesis.core

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "TANDEM_TEST_SEED"


def choose(named: int | None) -> int:
    """The seed of this run, kept in the environment for runners of pytest-xdist and given to hypothesis."""
    seed = int(os.environ.get(VARIABLE) or _of_commit()) if named is None else named
    os.environ[VARIABLE] = str(seed)
    if hypothesis.core.global_force_seed is None:
        vars(hypothesis.core)["global_force_seed"] = seed
    return seed


def current() -> int:
    """The chosen seed, also while tests are collected."""
    return int(os.environ.get(VARIABLE) or _of_commit())


def _of_commit() -> int:
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout.strip()[:7], 16) if done.returncode == 0 else 0
