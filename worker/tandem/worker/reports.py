"""Reports of a follower to rank 0, as bytes: its addresses, outcomes of its transfers, and its counters.

One byte for the kind, then msgpack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec

from tandem.core.ids import TransferId
from tandem.core.link_speed import ReportedLink
from tandem.kvtransfer.events import ReceiverEvent, SenderEvent
from tandem.kvtransfer.ticket import Endpoint


class Hello(msgspec.Struct, frozen=True):
    """The follower has loaded its part and takes commands; its transfer endpoints."""

    endpoints: tuple[Endpoint, ...]


class Expected(msgspec.Struct, frozen=True):
    """Frames of this transfer are accepted from now on."""

    transfer: TransferId


class Counters(msgspec.Struct, frozen=True):
    """The receiver's counters, cumulative."""

    values: dict[str, int]


class Links(msgspec.Struct, frozen=True):
    """The links that the follower's transfers go over."""

    links: tuple[ReportedLink, ...]


MAX_LINKS_BYTES = 384 * 1024
"""Of one report: three quarters of what its ring takes. Links beyond are not shown; they work all the same."""
Report = Hello | Expected | Counters | Links | ReceiverEvent | SenderEvent
_KINDS = {report: bytes([kind]) for kind, report in enumerate(get_args(Report))}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(report) for report in _KINDS]


def encode(report: Report) -> bytes:
    """The report as one message."""
    if isinstance(report, Links):
        report = Links(tuple(_that_fit(report.links)))
    return _KINDS[type(report)] + _ENCODER.encode(report)


def decode(data: bytes) -> Report:
    """Raises msgspec.DecodeError or IndexError for what `encode` did not make."""
    report: Report = _DECODERS[data[0]].decode(memoryview(data)[1:])
    return report


def _that_fit(links: Iterable[ReportedLink]) -> Iterator[ReportedLink]:
    """The first links, as many as one report holds: a worker of a large cluster has thousands."""
    left = MAX_LINKS_BYTES - 16  # overhead of the report
    for link in links:
        left -= len(_ENCODER.encode(link))
        if left < 0:
            return
        yield link
