"""A use of Ray where it is missing fails with a message on how to install it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tandem.controlplane.environment import Environment
from tandem.controlplane.open_launcher import opened
from tandem.controlplane.ray.launcher import check_installed
from tandem.controlplane.state_dir import StateDir
from tandem.core.config import ClusterConfig, LauncherName
from tandem.core.errors import StartupError

MISSING = (
    r"^Ray is not installed: --launcher ray needs it.* Install it with `pip install 'tandem-serve\[ray\]'`, on every"
)


def test_a_ray_that_is_there_is_nothing_to_speak_of() -> None:
    check_installed()


def test_a_cluster_that_asks_for_ray_where_it_is_missing_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    environment = Environment(state_root=tmp_path, socket_root=tmp_path, cores=1, variables={})
    config, said = ClusterConfig(launcher=LauncherName.RAY), list[str]()

    async def run() -> None:
        with StateDir(tmp_path, "test").hold() as held:
            async with opened(
                config, held, environment, command=(), hurry=asyncio.Event(), say=lambda part, text: said.append(text)
            ):
                pass

    with pytest.raises(StartupError, match=MISSING):
        asyncio.run(run())
    assert said == []
