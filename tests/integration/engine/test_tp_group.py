"""Test a tensor-parallel group, and a simulated model over its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.engine.parallel import SingleRank, open_group

if TYPE_CHECKING:
    from tests.integration.engine.conftest import Ranks

LOST_EXIT = 3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_gathers_and_a_default_group_beside_it(
    size: int, tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    start_ranks(tmp_path, size, "sums").wait()


def test_a_group_of_one_needs_no_distributed(tmp_path: Path) -> None:
    group = open_group(0, 1, device="cpu", rendezvous=tmp_path / "meeting", timeout_s=1)
    assert isinstance(group, SingleRank)
    ones = torch.ones(2, 3)
    assert group.all_reduce_(ones) is ones
    assert group.gather_columns(ones) is ones
    assert group.smallest((4, 5)) == (4, 5)
    assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize(("rank", "size", "timeout_s"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 2, 0)])
def test_groups_that_cannot_be_are_refused(rank: int, size: int, timeout_s: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tensor-parallel group"):
        open_group(rank, size, device="cpu", rendezvous=tmp_path / "meeting", timeout_s=timeout_s)


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_ends_the_others_at_once(size: int, tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    """The limit of a call is a minute: it is the closed connection that ends it."""
    ranks = start_ranks(tmp_path, size, "forever", timeout_s=60)
    ranks.wait_ready()
    ranks.processes[-1].kill()
    check_lost(ranks.processes[:-1], within_s=20)


def test_a_stopped_rank_ends_the_others_after_the_limit(tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks(tmp_path, 2, "forever", timeout_s=1.5)
    ranks.wait_ready()
    ranks.processes[1].send_signal(signal.SIGSTOP)
    check_lost(ranks.processes[:1], within_s=20, why="Timed out")


def test_ranks_with_different_steps_do_not_add_up(tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks(tmp_path, 2, "different", timeout_s=1.5)
    ranks.wait_ready()
    check_lost(ranks.processes, within_s=20)


def test_a_rank_that_never_comes_is_reported(tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks(tmp_path, 3, "forever", start_timeout_s=2, ranks=[0, 2])
    for process in ranks.processes:
        output = process.communicate(timeout=60)[0]
        assert "did not meet the other ranks" in output
        assert process.returncode == LOST_EXIT


def check_lost(processes: list, *, within_s: float, why: str = "") -> None:  # type: ignore[type-arg]
    deadline = time.monotonic() + within_s
    for process in processes:
        output = process.communicate(timeout=deadline - time.monotonic())[0]
        assert "WorkerLostError: rank" in output
        assert why in output
        assert process.returncode == LOST_EXIT


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
