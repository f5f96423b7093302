"""A head that dies is started again with what its Redis kept, and the same driver places workers as before."""

import asyncio

import psutil

from tandem.controlplane.environment import Environment
from tandem.controlplane.launcher import WorkerExited, WorkerReady
from tandem.controlplane.ray.head_process import RayHead
from tandem.controlplane.ray.launcher import RayLauncher
from tandem.controlplane.state_dir import HeldState
from tandem.core.config import RaySection
from tools.running_cluster import is_alive
from tools.waiting import wait_for, wait_for_async

from .test_ray_launcher import PROGRAM, D, P, _next, _ready, spec


def test_a_head_that_is_killed_comes_back_and_workers_are_placed_again(
    held: HeldState, environment: Environment
) -> None:
    said: list[str] = []
    seen: set[int] = set()
    others = {process.pid for process in psutil.Process().children(recursive=True)}  # clusters of other tests

    def look() -> list[psutil.Process]:
        below = [process for process in psutil.Process().children(recursive=True) if process.pid not in others]
        seen.update(process.pid for process in below)
        return below

    async def run() -> None:
        async with (
            RayHead(held, environment, RaySection(head_port=0, cpus=2), cluster="test", say=said.append) as head,
            RayLauncher(
                held, environment, cluster="test", address=head.address, token_file=str(head.token_file),
                place_timeout_s=60.0, arguments=(PROGRAM,),
            ) as launcher,
        ):  # fmt: skip
            await _ready(launcher)
            next(process for process in look() if process.name() == "gcs_server").kill()
            await wait_for_async(lambda: "the head runs again" in said, 90)
            await launcher.start_worker(spec(D))
            ready, is_lost = None, False
            while ready is None or not is_lost:  # the one on the head's machine died with it; in either order
                report = await _next(launcher)
                if isinstance(report, WorkerReady):
                    assert report.worker_id == D
                    ready = report
                elif isinstance(report, WorkerExited):
                    assert report.worker_id == P
                    is_lost = True
            assert ready.details["pid"] in {process.pid for process in look()}

    asyncio.run(run())
    assert len(seen) > 10
    wait_for(lambda: not [pid for pid in seen if is_alive(pid)])
