"""Every transport by name: its requirements, its place in "auto", and the functions that make its two ends.

A transport is one entry of `TRANSPORTS`. Its module is imported when an end of it is made, never before; an end that
cannot be made on this machine (a missing module, no GPU) raises ImportError or UnavailableTransportError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tandem.core.errors import ConfigError
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import Link, Listener, Peer
from tandem.kvtransfer.transports.listener_config import ListenerConfig

AUTO = "auto"
Preference = str
"""AUTO, or the name of a registered transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One way to carry frames. `dial` raises LinkClosedError; `listen` makes a listener that is not started yet.

    `is_one_host`: both ends must be on one host. `is_for_devices`: "auto" takes it only for pools in a GPU's memory.
    `is_automatic`: "auto" may take it at all; otherwise it has to be configured by name.
    """

    name: str
    dial: Callable[[Endpoint, Peer, ClusterSecret], Link]
    listen: Callable[[ListenerConfig], Listener]
    is_one_host: bool = False
    is_for_devices: bool = False
    is_automatic: bool = True

    def suits(self, *, on_device: bool) -> bool:
        """True if "auto" considers it."""
        return self.is_automatic and (on_device or not self.is_for_devices)


def find(name: str) -> Transport:
    """The transport called `name`. Raises ConfigError."""
    if name not in TRANSPORTS:
        raise ConfigError(f"unknown KV transport {name!r}", todo=f"use one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def check_preference(name: str) -> Preference:
    """`name` if a sender may prefer it. Raises ConfigError."""
    if name != AUTO and name not in TRANSPORTS:
        raise ConfigError(f"unknown KV transport {name!r}", todo=f"use one of {AUTO}, {', '.join(TRANSPORTS)}")
    return name


def _dial_shm(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
    from tandem.kvtransfer.transports.shm import ShmLink

    return ShmLink.dial(endpoint.address, peer, secret)


def _listen_shm(site: ListenerConfig) -> Listener:
    from tandem.kvtransfer.transports.shm_listener import ShmListener

    return ShmListener(site.intake, site.secret, site.rank, site.runtime_dir, site.ring_bytes)


def _dial_tcp(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
    from tandem.kvtransfer.transports.tcp import TcpLink

    return TcpLink.dial(endpoint.address, peer, secret)


def _listen_tcp(site: ListenerConfig) -> Listener:
    from tandem.kvtransfer.transports.tcp_listener import TcpListener

    return TcpListener(site.intake, site.secret, site.rank, site.bind_host, site.advertise_host)


def _dial_grpc(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
    from tandem.kvtransfer.transports.grpc import GrpcLink

    return GrpcLink.dial(endpoint.address, peer, secret)


def _listen_grpc(site: ListenerConfig) -> Listener:
    from tandem.kvtransfer.transports.grpc_listener import GrpcListener

    return GrpcListener(site.intake, site.secret, site.rank, site.bind_host, site.advertise_host)


def _collective(name: str, *, is_for_devices: bool = False) -> Transport:
    def dial(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
        from tandem.kvtransfer.transports.collective import CollectiveLink

        return CollectiveLink.dial(name, endpoint.address, peer, secret)

    def listen(site: ListenerConfig) -> Listener:
        from tandem.kvtransfer.transports.collective_listener import CollectiveListener

        return CollectiveListener(name, site)

    return Transport(name=name, dial=dial, listen=listen, is_for_devices=is_for_devices, is_automatic=False)


def _ipc(name: str, *, is_for_devices: bool = False) -> Transport:
    def dial(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
        from tandem.kvtransfer.transports.ipc import IpcLink

        return IpcLink.dial(name, endpoint.address, peer, secret)

    def listen(site: ListenerConfig) -> Listener:
        from tandem.kvtransfer.transports.ipc_listener import IpcListener

        return IpcListener(name, site)

    return Transport(
        name=name, dial=dial, listen=listen, is_one_host=True, is_for_devices=is_for_devices, is_automatic=False
    )


_ALL = (
    _ipc("cuda_ipc", is_for_devices=True),
    Transport(name="shm", dial=_dial_shm, listen=_listen_shm, is_one_host=True),
    Transport(name="tcp", dial=_dial_tcp, listen=_listen_tcp),
    Transport(name="grpc", dial=_dial_grpc, listen=_listen_grpc),
    _collective("gloo"),
    _ipc("cpu_ipc"),
    _collective("nccl", is_for_devices=True),
)
TRANSPORTS: Mapping[str, Transport] = MappingProxyType({transport.name: transport for transport in _ALL})
"""In the order in which "auto" tries them."""
