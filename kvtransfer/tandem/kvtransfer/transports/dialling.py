"""Which transport a sender tries, in which order, and why. Dialling is the proof: what fails is passed by."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import Link, LinkClosedError, Peer

Preference = Literal["auto", "shm", "grpc"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An endpoint worth dialling, and why it has its place."""

    endpoint: Endpoint
    reason: str


def candidates(endpoints: Sequence[Endpoint], host: str, preference: Preference) -> tuple[Candidate, ...]:
    """Endpoints of one rank in the order to try: shared memory on this host, then gRPC; or the preferred one alone."""
    chosen = []
    for endpoint in endpoints:
        if endpoint.transport == "shm" and preference == "shm":
            chosen.append((0, Candidate(endpoint, "configured")))
        elif endpoint.transport == "shm" and preference == "auto" and endpoint.host == host:
            chosen.append((0, Candidate(endpoint, "same host")))
        elif endpoint.transport == "grpc" and preference != "shm":
            is_local = endpoint.host == host
            reason = "configured" if preference == "grpc" else "same host, no shm" if is_local else "another host"
            chosen.append((1, Candidate(endpoint, reason)))
    return tuple(candidate for _, candidate in sorted(chosen, key=lambda pair: pair[0]))


def dial_first(options: Sequence[Candidate], peer: Peer, secret: ClusterSecret) -> tuple[Link, str]:
    """The first candidate that connects, and why it was chosen. Raises LinkClosedError with every failure."""
    failures: list[str] = []
    for candidate in options:
        endpoint = candidate.endpoint
        try:
            link = _dial(endpoint, peer, secret)
        except LinkClosedError as error:
            failures.append(f"{endpoint.transport} failed: {error}")
            event(_log, "transfer_dial_failed", logging.WARNING, transport=endpoint.transport, error=str(error))
            continue
        reason = "; ".join([candidate.reason, *failures])
        event(_log, "transfer_link_chosen", transport=endpoint.transport, reason=reason)
        return link, reason
    raise LinkClosedError("; ".join(failures) or "the ticket offers no transport that this sender may use")


def _dial(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
    if endpoint.transport == "shm":
        from tandem.kvtransfer.transports.shm import ShmLink

        return ShmLink.dial(endpoint.address, peer, secret)
    try:
        from tandem.kvtransfer.transports.grpc import GrpcLink
    except ImportError as error:
        raise LinkClosedError(f"grpcio is not installed: {error}") from error
    return GrpcLink.dial(endpoint.address, peer, secret)
