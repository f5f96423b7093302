"""The actor that runs one worker: a `RayWorkerRunner` that Ray calls with plain text and bytes alone."""

from __future__ import annotations

import os
import threading

import ray
import ray.util

from tandem.controlplane.ray.messages import PlacedOrder, from_json, to_json
from tandem.controlplane.ray.runner import RayWorkerRunner


class Agent:
    """One worker's agent: no restarts, detached, in the first bundle of its placement group."""

    def __init__(self, orphan_s: float) -> None:
        self.ip: str = ray.util.get_node_ip_address()
        self._runner = RayWorkerRunner(ip=self.ip, orphan_s=orphan_s)
        threading.Thread(target=self._leave, args=(orphan_s,), name="leaving", daemon=True).start()

    def place(self) -> list[str]:
        """Return this node's address, then the GPUs of this bundle."""
        return [self.ip, *(str(gpu) for gpu in ray.get_gpu_ids())]

    def begin(self, charge: str, secret: bytes) -> None:
        """Start the worker; see `RayWorkerRunner.begin`."""
        self._runner.begin(from_json(charge, PlacedOrder), secret)

    def digest(self) -> str:
        """Return the digest of the order it runs; "" when it runs none, or no more."""
        order = self._runner.order
        return order.digest if order is not None else ""

    def order(self) -> str:
        """Return the order it runs, as JSON; "" when it runs none, or no more."""
        order = self._runner.order
        return to_json(order) if order is not None else ""

    def listen(self, after: int, wait_s: float) -> list[str]:
        """See `RayWorkerRunner.listen`. One such call is always under way: it fails when this actor dies."""
        return self._runner.listen(after, wait_s)

    def stop(self, grace_s: float) -> None:
        """See `RayWorkerRunner.stop`."""
        self._runner.stop(grace_s)

    def _leave(self, orphan_s: float) -> None:
        """Give the place back when the worker has ended and no controller comes to remove us."""
        self._runner.wait()
        self._runner.await_silence(orphan_s)
        group = ray.util.get_current_placement_group()
        if group is not None:
            ray.util.remove_placement_group(group)
        os._exit(0)


def own_gpus() -> list[str]:
    """Return the GPUs of the bundle that this task runs in."""
    return [str(gpu) for gpu in ray.get_gpu_ids()]
