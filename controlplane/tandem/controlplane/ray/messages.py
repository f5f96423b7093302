"""JSON messages between launcher, driver and agents: orders one way, reports of workers the other way."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.core import config_loader
from tandem.core.config import WorkerConfig
from tandem.core.errors import ConfigError

T = TypeVar("T")

ANY_HARDWARE = "any"
HARDWARE_LABEL = "tandem-hardware"
"""Ray label of a node's hardware class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverConfig:
    """Start configuration of a driver. `place_timeout_s`: how long a worker waits for a place. `node_ip`: the address
    of the node that it belongs to, the head's; "" = any on its machine, where Ray sees them all."""

    cluster: str
    address: str
    node_ip: str = ""
    secret_file: str
    place_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One worker to run. Host, folders and the secret's file in `config` are replaced on its node.

    `arguments` follow the node's own Python. `needs_gpu` None = if the nodes that it may be placed on have GPUs.
    """

    config: WorkerConfig
    threads: int
    hardware: str = ANY_HARDWARE
    arguments: tuple[str, ...] = ("-m", "tandem.worker")
    needs_gpu: bool | None = False

    @property
    def digest(self) -> str:
        """Equal for orders that ask for the same worker in every respect."""
        return hashlib.sha256(config_loader.dump(self)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOrder:
    """An order with the facts of its place. `gpus`: the ids that the ranks may use, one a rank; `gpu_wait_s`:
    how long to wait for others to give them back."""

    order: Order
    gpus: tuple[str, ...] = ()
    gpu_wait_s: float = 60.0
    controller_ip: str = ""
    """Where the controller runs; "" = not known."""


def to_json(value: Any) -> str:
    """Return the value as one line of JSON."""
    return json.dumps(json.loads(config_loader.dump(value)))


def from_json(text: str, kind: type[T]) -> T:
    """Parse the output of `to_json`; ConfigError if it is anything else."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError("an order is not JSON", why=str(error)) from None
    if not isinstance(data, dict):
        raise ConfigError("an order is not an object")
    return config_loader.from_mapping(data, kind, source="an order")


def say(message: Mapping[str, Any]) -> None:
    """Write a message as a line of JSON on the standard output, for the process that started this one."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
