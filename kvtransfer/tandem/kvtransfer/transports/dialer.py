"""Orders the transports that a sender tries, with reasons, and dials them: one that fails is skipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import Link, LinkClosedError, Peer, UnavailableTransportError
from tandem.kvtransfer.transports.registry import AUTO, TRANSPORTS, Preference

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DialCandidate:
    """An endpoint worth dialling, and why it has its place."""

    endpoint: Endpoint
    reason: str


def candidates(
    endpoints: Sequence[Endpoint], host: str, preference: Preference, *, on_device: bool = False
) -> tuple[DialCandidate, ...]:
    """Endpoints of one rank in the order to try: the registry's, or the preferred one alone.

    `on_device`: this sender's pools lie in a GPU's memory. Endpoints of transports unknown here are left out.
    """
    chosen = []
    for place, transport in enumerate(TRANSPORTS.values()):
        for endpoint in endpoints:
            if endpoint.transport != transport.name:
                continue
            is_here = endpoint.host == host
            if preference == transport.name:
                chosen.append((place, DialCandidate(endpoint, "configured")))
            elif preference == AUTO and transport.suits(on_device=on_device) and (is_here or not transport.is_one_host):
                chosen.append((place, DialCandidate(endpoint, "same host" if is_here else "another host")))
    return tuple(candidate for _, candidate in sorted(chosen, key=lambda pair: pair[0]))


def dial_first(options: Sequence[DialCandidate], peer: Peer, secret: ClusterSecret) -> tuple[Link, str]:
    """Dial in order; return the first link that connects, and the reason. Raises LinkClosedError with every failure."""
    failures: list[str] = []
    for candidate in options:
        name = candidate.endpoint.transport
        try:
            link = dial(candidate.endpoint, peer, secret)
        except LinkClosedError as error:
            failures.append(f"{name} failed: {error}")
            event(_log, "transfer_dial_failed", logging.WARNING, transport=name, error=str(error))
            continue
        reason = "; ".join([candidate.reason, *failures])
        event(_log, "transfer_link_chosen", transport=name, reason=reason)
        return link, reason
    raise LinkClosedError("; ".join(failures) or "the ticket offers no transport that this sender may use")


def dial(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
    """A link to one endpoint. Raises LinkClosedError, also where its transport cannot work on this machine."""
    try:
        return TRANSPORTS[endpoint.transport].dial(endpoint, peer, secret)
    except (ImportError, UnavailableTransportError) as error:
        raise LinkClosedError(f"not available here: {error}") from error
