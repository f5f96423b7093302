"""`python -m tandem.controlplane.ray.driver --config FILE`: the one process of a controller that talks to Ray.

Orders come as JSON lines on standard input, {"start": worker, "order": FILE, "after": N}, {"stop": worker,
"grace_s": S}, {"find": "others"} and {"leave": PLACE}; reports leave on standard output. It ends when its input does,
and leaves workers as they are: the next driver finds them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from tandem.controlplane import gpu_free_check
from tandem.controlplane.ray import placement
from tandem.controlplane.ray.messages import DriverConfig, Order, PlacedOrder, say, to_json
from tandem.controlplane.ray.placement import NoPlaceError, WorkerPlacement, result
from tandem.core import config_loader
from tandem.core.errors import TandemError

_LISTEN_S = 10.0
_UNAVAILABLE_S = 1.0
_SILENCE_S = 30.0
"""More than `_LISTEN_S`: a live agent answers in between, and needs no head for that."""
_STOP_SLACK_S = 20.0


class SilentAgentError(Exception):
    """An agent has not answered for too long."""


class Following:
    """One worker from its order to its end; the last report is always {"exited": …, "is_unplaced": …,
    "is_place_lost": …}."""

    def __init__(
        self, worker: str, order: Order, secret: bytes, config: DriverConfig, say: Callable[..., None]
    ) -> None:
        self._worker, self._order, self._secret, self._config = worker, order, secret, config
        self._say, self._prefix = say, f"tandem:{config.cluster}:{worker}:"
        self._place: WorkerPlacement | None = None
        self._is_stopping = asyncio.Event()

    async def run(self, after: int) -> None:
        """Find or place the worker and pass on its reports from number `after` on."""
        is_unplaced = is_place_lost = False
        working = asyncio.create_task(self._work(after))
        stopping = asyncio.create_task(self._is_stopping.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if self._place is None and not working.done():  # nothing runs yet: no need to wait for a place
                working.cancel()
            reason = await working
        except asyncio.CancelledError:
            if not self._is_stopping.is_set():  # the driver ends, the worker does not
                raise
            await placement.clear(self._prefix)
            reason = "it was stopped before it had a place"
        except (NoPlaceError, SilentAgentError, ray.exceptions.RayError, TimeoutError, ValueError) as error:
            reason, is_unplaced, is_place_lost = _in_a_line(error), isinstance(error, NoPlaceError), _is_loss(error)
        finally:
            working.cancel()
            stopping.cancel()
        if self._place is not None:
            await self._place.leave()
        self._say(exited=reason, is_unplaced=is_unplaced, is_place_lost=is_place_lost)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end; `run` ends then. An agent that does not answer is ended by force."""
        self._is_stopping.set()
        if self._place is None:
            return
        try:
            await asyncio.wait_for(result(self._place.agent.stop.remote(grace_s)), grace_s + _STOP_SLACK_S)
        except (ray.exceptions.RayError, TimeoutError):
            await self._place.leave()

    async def _work(self, after: int) -> str:
        place = await placement.find(self._prefix, self._order.digest)
        if place is None:
            after = 0
            place, (ip, *gpus) = await placement.take(
                self._prefix, self._order, self._config.place_timeout_s, lambda text: self._say(progress=text)
            )
            self._place = place
            self._say(place=[ip, *gpus])
            charge = PlacedOrder(
                order=self._order,
                gpus=tuple(gpus),
                gpu_wait_s=min(gpu_free_check.WAIT_S, self._config.place_timeout_s),
                controller_ip=ray.util.get_node_ip_address(),
            )
            await result(place.agent.begin.remote(to_json(charge), self._secret))
        self._place = place
        return await self._listen(place, after)

    async def _listen(self, place: WorkerPlacement, after: int) -> str:
        """Listen until the worker has ended, or its agent has died: the call in progress then fails at once.
        NoPlaceError when it never began, as another process holds its GPUs.

        A silent agent is given up, too (SilentAgentError): it hangs, or the head that could report its death died with
        it.
        """
        clock = asyncio.get_running_loop().time
        heard_s = clock()
        while True:
            try:
                reports = await asyncio.wait_for(result(place.agent.listen.remote(after, _LISTEN_S)), _SILENCE_S)
            except (ray.exceptions.ActorUnavailableError, TimeoutError):
                if clock() - heard_s >= _SILENCE_S:
                    raise SilentAgentError(f"its agent has not answered for {_SILENCE_S:g} s") from None
                await asyncio.sleep(_UNAVAILABLE_S)
                continue
            heard_s = clock()
            for text in reports:
                after += 1
                report = json.loads(text)
                if "exited" in report:
                    if report.get("is_unplaced"):
                        raise NoPlaceError(str(report["exited"]))
                    return str(report["exited"])
                self._say(**report, after=after)


class Driver:
    """Reads orders and runs a `Following` for each worker."""

    def __init__(self, config: DriverConfig, say: Callable[[dict[str, Any]], None]) -> None:
        self._config, self._say = config, say
        self._secret = Path(config.secret_file).read_bytes()
        self._followings: dict[str, Following] = {}

    async def run(self, lines: asyncio.StreamReader) -> None:
        """Run until the input ends."""
        async with asyncio.TaskGroup() as tasks:
            following: list[asyncio.Task[None]] = []
            await placement.sweep(f"tandem:{self._config.cluster}:")
            while line := await lines.readline():
                command = json.loads(line)
                if "start" in command:
                    following.append(tasks.create_task(self._follow(command)))
                elif "find" in command:
                    following.append(tasks.create_task(self._find_others()))
                elif "leave" in command:
                    tasks.create_task(placement.clear(command["leave"]))
                elif (found := self._followings.get(command["stop"])) is not None:
                    tasks.create_task(found.stop(float(command["grace_s"])))
            for task in following:
                task.cancel()

    async def _find_others(self) -> None:
        """Report running workers that were not ordered from us, but from an earlier controller. Remains of ended ones
        are removed."""
        prefix = f"tandem:{self._config.cluster}:"
        for place in await placement.places(prefix):
            worker = place.name.removeprefix(prefix).rpartition(":")[0]
            if worker in self._followings:
                continue
            order = await place.asked("order")
            if worker in self._followings:
                continue
            if order:
                self._say({"worker": worker, "found": order, "place_name": place.name})
            else:
                await place.leave()

    async def _follow(self, command: dict[str, Any]) -> None:
        worker = str(command["start"])
        order = config_loader.load(Path(command["order"]), Order)
        one = Following(worker, order, self._secret, self._config, lambda **said: self._say({"worker": worker, **said}))
        self._followings[worker] = one
        try:
            await one.run(int(command.get("after", 0)))
        finally:
            if self._followings.get(worker) is one:
                del self._followings[worker]


async def _main(config: DriverConfig) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await Driver(config, say).run(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, type=Path)
    try:
        config = config_loader.load(parser.parse_args().config, DriverConfig)
        ray.init(
            address=config.address,
            _node_ip_address=config.node_ip or None,
            namespace=f"tandem-{config.cluster}",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (TandemError, ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError) as error:
        say({"fatal": _in_a_line(error)})
        return 1
    say({"attached": config.address})
    asyncio.run(_main(config))
    ray.shutdown()
    return 0


def _is_loss(error: BaseException) -> bool:
    """True if the place is gone. An agent that raises an exception has one, and would raise it elsewhere, too."""
    if isinstance(error, ray.exceptions.RayActorError):
        return not error.actor_init_failed
    is_of_ray = isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError)
    return is_of_ray or isinstance(error, SilentAgentError)


def _in_a_line(error: BaseException) -> str:
    """Return the cause in a line. Ray reports it in many lines, the cause in the last."""
    if isinstance(error, ray.exceptions.ActorDiedError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"its agent died: {lines[-1][:300] if lines else 'Ray does not say why'}"
    return " ".join(str(error).split())[:400] or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
