"""Take a place, have its agent hang or die, and look for it as a driver does that is started anew.

Arguments: Ray's address, the file of an order, the signal for the agent, and "find" or "clear". The last line of output
is what was found, and what is left.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import ray

from tandem.controlplane.ray import placement
from tandem.controlplane.ray.messages import Order
from tandem.core import config_loader

PREFIX = "tandem:test:lost:"


async def main(order: Order, number: int, how: str) -> None:
    place, _ = await placement.take(PREFIX, order, 60.0, print)
    pid = await placement.result(place.agent.__ray_call__.remote(lambda agent: os.getpid()))
    os.kill(pid, number)
    placement._AGENT_TIMEOUT_S = 2.0  # of a minute
    found = None
    if how == "find":
        found = await placement.find(PREFIX, order.digest)
    else:
        await placement.clear(PREFIX)
    left = sorted(await placement._groups(PREFIX))
    print(json.dumps({"pid": pid, "found": found is not None, "groups": left}))


if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="tandem-test", log_to_driver=False)
    asyncio.run(main(config_loader.load(Path(sys.argv[2]), Order), int(sys.argv[3]), sys.argv[4]))
    ray.shutdown()
