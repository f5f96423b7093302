"""Speed of a transport between two hosts: one measurement, as workers, Redis and routers pass it on; links in use."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import Rank, WorkerId

Route = tuple[str, str, str]
"""(from host, to host, transport)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """One measurement, or why there is none. `peer`: the receiving worker at which it was taken.

    `age_s`: seconds since then, for readers with another clock.
    """

    from_host: str
    to_host: str
    transport: str
    peer: str = ""
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    age_s: float = 0.0
    failure: str = ""

    @property
    def route(self) -> Route:
        return (self.from_host, self.to_host, self.transport)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLink:
    """A link from a rank of the worker that reports it to one of `peer`; speeds in bytes a second, 0 = no figure.

    `transport` is empty while it dials; `reason` is why this one was chosen. `unused`: transports that would come
    before it, each with why it was not taken.
    """

    rank: Rank
    peer: WorkerId
    peer_rank: Rank
    transport: str
    from_host: str = ""
    to_host: str = ""
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    achieved_bytes_per_s: float = 0.0
    stalls: int
    reason: str
    unused: tuple[str, ...] = ()


def rate(bytes_per_s: float) -> str:
    """Bytes a second for users: "3.20 GB/s", "12.5 MB/s"; a dash where there is no figure."""
    if bytes_per_s <= 0:
        return "–"
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
