"""A runner without Ray: `runner_program.py ORPHAN_S` obeys JSON lines and answers each with one. Its clock moves on
request alone."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

from tandem.controlplane.ray.messages import PlacedOrder, from_json
from tandem.controlplane.ray.runner import RayWorkerRunner
from tools.waiting import wait_for

IP = "10.0.0.2"


class Clock:
    """Counts reads of the clock."""

    def __init__(self) -> None:
        self.time_s, self.looks = 0.0, 0

    def now_s(self) -> float:
        self.looks += 1
        return self.time_s


def main() -> None:
    clock = Clock()
    runner = RayWorkerRunner(ip=IP, orphan_s=float(sys.argv[1]), now_s=clock.now_s)
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line), runner, clock)), flush=True)


def begin(runner: RayWorkerRunner, charge: PlacedOrder, reports: int) -> None:
    """A call, in a thread that ends with it; not before the worker has made so many reports."""
    runner.begin(charge, b"secret")
    if reports:
        runner.listen(reports - 1, 20.0)


def obey(told: list[Any], runner: RayWorkerRunner, clock: Clock) -> Any:
    match told:
        case ["begin", charge, reports]:
            call = threading.Thread(target=begin, args=(runner, from_json(charge, PlacedOrder), reports))
            call.start()
            call.join()
            wait_for(lambda: not Path(f"/proc/self/task/{call.native_id}").exists())
        case ["listen", after, wait_s]:
            return runner.listen(after, wait_s)
        case ["stop", grace_s]:
            runner.stop(grace_s)
        case ["wait"]:
            runner.wait()
        case ["advance", seconds]:
            clock.time_s += seconds
        case ["looks"]:
            return clock.looks
        case _:
            raise ValueError(f"unknown: {told}")
    return None


if __name__ == "__main__":
    main()
