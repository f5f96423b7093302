"""`python -m tandem.worker --config FILE`: the host process of one worker.

Prints JSON lines for its launcher: {"progress": …} while starting, then {"ready": …} or {"fatal": …}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from tandem.core.clock import MonotonicClock
from tandem.core.config import WorkerConfig
from tandem.core.config_loader import load
from tandem.core.cpu_level import hold_libraries
from tandem.core.errors import StartupError, TandemError
from tandem.core.logs import JSON, setup
from tandem.core.memory import freeze_gc
from tandem.core.start_times import StartPhase, StartTimes, process_started_s
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.host import WorkerHost

_log = logging.getLogger(__name__)
EXIT_STARTUP = 2
EXIT_LOST = 1


def main() -> int:
    clock = MonotonicClock()
    times = StartTimes(StartPhase.IMPORTS, clock, process_started_s(clock))
    times.enter(StartPhase.CONFIG)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    arguments = parser.parse_args()
    try:
        hold_libraries()  # of the ranks, which inherit the environment
        config = load(arguments.config, WorkerConfig)
        setup(config.worker_id, level=config.log_level, as_json=config.log_format == JSON)
        return asyncio.run(_serve(config, arguments.config, times))
    except (TandemError, BaseExceptionGroup) as raised:
        error = _first(raised)
        if isinstance(error, TandemError):
            _say({"fatal": error.message, "code": error.code})
            return EXIT_STARTUP if isinstance(error, StartupError) else EXIT_LOST
        _log.exception("the worker ends")
        _say({"fatal": str(error) or type(error).__name__, "code": "internal"})
        return EXIT_LOST


async def _serve(config: WorkerConfig, config_file: Path, times: StartTimes) -> int:
    host = WorkerHost(config, config_file, lambda text: _say({"progress": text}), times)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop)

    def ready(info: w.WorkerInfo) -> None:
        freeze_gc()
        _say({"ready": _summary(info)})

    await host.run(ready)
    return 0


def _summary(info: w.WorkerInfo) -> dict[str, Any]:
    return {"pid": os.getpid(), **MessageToDict(info, preserving_proto_field_name=True)}


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _first(error: BaseException) -> BaseException:
    """The first cause inside nested groups; a TandemError goes before others, because it holds more information."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_first(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, TandemError)), causes[0])


if __name__ == "__main__":
    sys.exit(main())
