"""`python -m tests.integration.worker.drop_program KIND ROUNDS`: make, use and drop an engine pair, a host's service or
a router, and print the resident memory of this process after each round, in MiB, as JSON."""

import asyncio
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tandem.core.memory import return_free_memory


def drop_engines(folder: Path) -> None:
    from tests.integration.worker.loopback import Loopback, prompt_of
    from tests.integration.worker.pair import MODEL

    pair = Loopback(folder, MODEL, transport="shm", chunk_tokens=64)
    pair.submit("r", prompt_of(100))
    pair.rest_at_baseline()
    pair.close()


def drop_host(_: Path) -> None:
    from tests.integration.workerhost.service import Backend, serving

    async def run() -> None:
        async with serving(Backend()):
            pass

    asyncio.run(run())


def drop_router(folder: Path) -> None:
    from tests.integration.router.house import ask, builder

    with builder(folder) as make:
        house = make()
        house.wait_ready()
        assert ask(house).status_code == 200


KINDS: dict[str, Callable[[Path], None]] = {"engines": drop_engines, "host": drop_host, "router": drop_router}


def main() -> int:
    drop, rounds = KINDS[sys.argv[1]], int(sys.argv[2])
    resident = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="td-") as folder:
            drop(Path(folder))
        gc.collect()
        return_free_memory()  # or what threads' heaps have free would count, more of it on a busy machine
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
    print(json.dumps(resident))
    return 0


if __name__ == "__main__":
    sys.exit(main())
