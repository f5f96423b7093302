"""A rank that hangs before it is ready ends its worker, with the reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.errors import WorkerLostError
from tandem.core.lifecycle import RoleName
from tandem.core.secret import ClusterSecret
from tandem.workerhost import host as hosting
from tandem.workerhost import rank_group
from tandem.workerhost.host import WorkerHost
from tests.integration.workerhost import hanging_rank
from tools.running_cluster import is_alive


def test_a_rank_that_hangs_while_it_loads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "MODULE", hanging_rank.__name__)
    monkeypatch.setattr(hosting, "LOADING_LOOKS", 2)
    ClusterSecret.generate().save(tmp_path / "secret")
    config = WorkerConfig(
        cluster="test", worker_id="m0", role=RoleName.MIXED, pool="mixed", model="none", model_dir=str(tmp_path),
        revision="", dtype="float32", max_model_len=0, redis_url="redis://127.0.0.1:1", runtime_dir=str(tmp_path),
        secret_file=str(tmp_path / "secret"), settings=WorkerSection(threads=1, tp=2),
    )  # fmt: skip

    async def run() -> list[int]:
        host = WorkerHost(config, tmp_path / "config", on_progress=lambda _: None)
        with pytest.raises(ExceptionGroup) as raised:
            await host.run(lambda _: None)
        (why,) = _causes(raised.value)
        assert isinstance(why, WorkerLostError)
        assert "rank 0 hangs while it loads" in str(why)
        return host._ranks.pids

    pids = asyncio.run(run())
    assert len(pids) == 2
    assert all(pids)
    assert not any(is_alive(pid) for pid in pids)


def _causes(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in _causes(inner)]
    return [error]
