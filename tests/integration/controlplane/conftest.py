"""A cluster's parts with small real programs in place of workers and routers."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.controlplane.environment import Environment
from tandem.controlplane.state_dir import HeldState, StateDir
from tools.waiting import wait_for

HERE = Path(__file__).resolve().parent
FAKE_WORKER = (sys.executable, str(HERE / "fake_worker.py"))
FAKE_ROUTER = (sys.executable, str(HERE / "fake_router.py"))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(state_root=tmp_path / "state", socket_root=Path("/tmp"), cores=2, variables=dict(os.environ))


@pytest.fixture
def held(environment: Environment) -> Iterator[HeldState]:
    with StateDir(environment.state_root, "test").hold() as held:
        yield held


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Any]:
    return wait_for


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """All processes that a test started below this one are gone at its end."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    _, alive = psutil.wait_procs(
        [child for child in psutil.Process().children(recursive=True) if child.pid not in before], timeout=30
    )
    assert not alive
