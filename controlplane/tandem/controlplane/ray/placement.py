"""Places for workers: a placement group each, with one bundle a rank on one node, and the agent in its first bundle."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.controlplane.ray.agent import Agent, own_gpus
from tandem.controlplane.ray.messages import ANY_HARDWARE, HARDWARE_LABEL, Order
from tandem.controlplane.ray.unschedulable import RayNodeResources, shortage
from tandem.core.events import FOR_A_PLACE

ORPHAN_S = 600.0
"""A worker without a controller ends after so long. As long as nodes wait for a head that is gone."""
_WAIT_S = 1.0
_AGENT_TIMEOUT_S = 60.0


class NoPlaceError(Exception):
    """A worker got no place; the message contains the reason."""


class WorkerPlacement:
    """A worker's placement group and agent. Created by `take` or `find`; `leave` removes both."""

    def __init__(self, name: str, group: Any, agent: Any) -> None:
        self.name, self._group, self.agent = name, group, agent

    async def asked(self, what: str) -> str | None:
        """Return its agent's response to a question without arguments; None if it gives none, or knows no such
        question."""
        try:
            return str(await asyncio.wait_for(result(getattr(self.agent, what).remote()), _AGENT_TIMEOUT_S))
        except (ray.exceptions.RayError, TimeoutError, AttributeError):  # an older agent lacks some of the methods
            return None

    async def leave(self) -> None:
        """End the agent, with all that it runs, and give the resources back."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            await asyncio.to_thread(ray.kill, self.agent)
        await _remove(self._group)


async def find(prefix: str, wanted: str | None) -> WorkerPlacement | None:
    """Return the place of a worker that runs an order of digest `wanted`; everything else with the prefix is removed.

    That includes an agent that has died or does not answer. None = nothing is wanted.
    """
    found: WorkerPlacement | None = None
    groups = await _groups(prefix)
    for place in await places(prefix, groups):
        if found is None and wanted is not None and await place.asked("digest") == wanted:
            found = place
        else:
            await place.leave()
    for group in groups.values():  # those without an agent
        await _remove(group)
    return found


async def places(prefix: str, groups: dict[str, Any] | None = None) -> list[WorkerPlacement]:
    """Return every place with an agent, dead or alive. Its group, by the agent's name, is taken out of `groups`."""
    groups = await _groups(prefix) if groups is None else groups
    found = []
    for name in await asyncio.to_thread(ray.util.list_named_actors):
        if name.startswith(prefix):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it has left meanwhile
                agent = await asyncio.to_thread(ray.get_actor, name)
                found.append(WorkerPlacement(name, groups.pop(name, None), agent))
    return found


async def clear(prefix: str) -> None:
    """Remove every place with the prefix, and the processes there."""
    await find(prefix, None)


async def take(
    prefix: str, order: Order, timeout_s: float, say: Callable[[str], None]
) -> tuple[WorkerPlacement, list[str]]:
    """Return a new place and its agent's report: the node's address, then the GPUs. NoPlaceError after `timeout_s`.

    While it waits, `say` gets the missing resources.
    """
    name = f"{prefix}{secrets.token_hex(4)}"
    nodes = await asyncio.to_thread(living_nodes)
    bundle = bundle_of(order, nodes)
    tp = order.config.settings.tp
    selector = {} if order.hardware == ANY_HARDWARE else {HARDWARE_LABEL: order.hardware}
    group = await asyncio.to_thread(
        lambda: ray.util.placement_group(
            [dict(bundle)] * tp,
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[selector] * tp if selector else None,
        )
    )
    try:
        await _await_group(group, {key: amount * tp for key, amount in bundle.items()}, order, timeout_s, say)
        agent = _agent(name, group, has_gpu="GPU" in bundle)
        first = await asyncio.wait_for(result(agent.place.remote()), _AGENT_TIMEOUT_S)
        others = [result(_gpus_of(group, rank)) for rank in range(1, tp)] if "GPU" in bundle else []
        gpus = [gpu for found in await asyncio.gather(*others) for gpu in found]
    except BaseException as error:
        await _remove(group)
        if isinstance(error, TimeoutError):
            raise NoPlaceError(f"its agent did not start within {_AGENT_TIMEOUT_S:g} s") from error
        raise
    return WorkerPlacement(name, group, agent), [str(word) for word in (*first, *gpus)]


async def sweep(prefix: str) -> None:
    """Remove places that have lost their agents: remains of an earlier head."""
    agents = set(await asyncio.to_thread(ray.util.list_named_actors))
    for name, group in (await _groups(prefix)).items():
        if name not in agents:
            await _remove(group)


def bundle_of(order: Order, nodes: list[RayNodeResources]) -> dict[str, float]:
    """Return the resources that one rank needs."""
    has_gpu = order.needs_gpu
    if has_gpu is None:
        fitting = [node for node in nodes if order.hardware in (ANY_HARDWARE, node.hardware)]
        has_gpu = any(node.total.get("GPU", 0.0) for node in fitting)
    return {"CPU": float(order.threads), **({"GPU": 1.0} if has_gpu else {})}


def living_nodes() -> list[RayNodeResources]:
    """Return all nodes that Ray believes alive."""
    from ray._private.state import available_resources_per_node  # no public API gives the free resources of each node

    free = available_resources_per_node()
    return [
        RayNodeResources(
            address=str(node["NodeManagerAddress"]),
            labels=dict(node.get("Labels") or {}),
            total=dict(node["Resources"]),
            free=dict(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


async def _await_group(
    group: Any, needs: dict[str, float], order: Order, timeout_s: float, say: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    ends_s, told = loop.time() + timeout_s, ""
    while not await asyncio.to_thread(group.wait, _WAIT_S):
        missing = shortage(await asyncio.to_thread(living_nodes), needs, order.hardware)
        if missing and missing != told:
            told = missing
            say(f"waiting {FOR_A_PLACE}{missing}")
        if loop.time() > ends_s:
            raise NoPlaceError(f"it got no place within {timeout_s:g} s: {missing or 'Ray gave none'}")


def _agent(name: str, group: Any, *, has_gpu: bool) -> Any:
    return (
        ray.remote(Agent)
        .options(
            name=name,
            lifetime="detached",
            num_cpus=0,
            num_gpus=1 if has_gpu else 0,
            max_restarts=0,
            max_concurrency=16,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        .remote(ORPHAN_S)
    )


def _gpus_of(group: Any, rank: int) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return ray.remote(own_gpus).options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).remote()


async def result(ref: Any) -> Any:
    """Wait for the result of a call of Ray."""
    return await asyncio.wrap_future(ref.future())


async def _groups(prefix: str) -> dict[str, Any]:
    """Return placement groups by name that are not removed yet."""
    table = await asyncio.to_thread(ray.util.placement_group_table)
    names = [entry["name"] for entry in table.values() if entry["state"] != "REMOVED"]
    found: dict[str, Any] = {}
    for name in (name for name in names if name.startswith(prefix)):
        with contextlib.suppress(ValueError):
            found[name] = await asyncio.to_thread(ray.util.get_placement_group, name)
    return found


async def _remove(group: Any) -> None:
    if group is not None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            await asyncio.to_thread(ray.util.remove_placement_group, group)
