"""Reports of a follower to rank 0, as bytes: its addresses, outcomes of its transfers, and its counters."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tandem.core.ids import TransferId
from tandem.kvtransfer.events import Failed, Quiesced, ReceiverEvent, SendCompleted, SenderEvent, SendFailed, Verified
from tandem.kvtransfer.peer_link import LinkInfo
from tandem.kvtransfer.ticket import Endpoint
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.link_wire import link_from_wire, link_to_wire
from tandem.workercore.proto_convert import endpoint_from_wire, endpoint_to_wire

_KIND = struct.Struct("<B")
_TRANSFER = struct.Struct("<BQ")
_VERIFIED = struct.Struct("<BQddQ")
_SENT = struct.Struct("<BQQ")
_HELLO, _EXPECTED, _COUNTERS, _VERIFIED_KIND, _FAILED, _SENT_KIND, _SEND_FAILED, _QUIESCED, _LINKS = range(9)


@dataclass(frozen=True, slots=True)
class Hello:
    """The follower has loaded its part and takes commands; its transfer endpoints."""

    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """Frames of this transfer are accepted from now on."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Counters:
    """The receiver's counters, cumulative."""

    values: dict[str, int]


@dataclass(frozen=True, slots=True)
class Links:
    """The links that the follower's transfers go over."""

    links: tuple[LinkInfo, ...]


MAX_LINKS_BYTES = 256 * 1024
"""Of one report: half of what its ring takes. Links beyond are not shown; they work all the same."""
Report = Hello | Expected | Counters | Links | ReceiverEvent | SenderEvent


def encode(report: Report) -> bytes:
    """The report as one message."""
    match report:
        case Hello():
            message = e.RankReady(endpoints=[endpoint_to_wire(endpoint) for endpoint in report.endpoints])
            return _KIND.pack(_HELLO) + message.SerializeToString()
        case Expected():
            return _TRANSFER.pack(_EXPECTED, report.transfer)
        case Counters():
            return _KIND.pack(_COUNTERS) + json.dumps(report.values).encode()
        case Links():
            return _KIND.pack(_LINKS) + w.LoadReport(links=_that_fit(report.links)).SerializeToString()
        case Verified():
            return _VERIFIED.pack(
                _VERIFIED_KIND, report.transfer, report.last_wire_s, report.verified_at_s, report.bytes
            )
        case Failed():
            return _TRANSFER.pack(_FAILED, report.transfer) + report.reason.encode()
        case SendCompleted():
            return _SENT.pack(_SENT_KIND, report.transfer, report.bytes)
        case SendFailed():
            return _TRANSFER.pack(_SEND_FAILED, report.transfer) + report.reason.encode()
        case Quiesced():
            return _TRANSFER.pack(_QUIESCED, report.transfer)


def decode(data: bytes) -> Report:
    """Raises ValueError, struct.error or protobuf's DecodeError for what `encode` did not make."""
    kind, body = data[0], data[1:]
    if kind == _HELLO:
        return Hello(tuple(endpoint_from_wire(m) for m in e.RankReady.FromString(body).endpoints))
    if kind == _COUNTERS:
        return Counters({str(name): int(value) for name, value in json.loads(body).items()})
    if kind == _LINKS:
        return Links(tuple(map(link_from_wire, w.LoadReport.FromString(body).links)))
    if kind == _VERIFIED_KIND:
        _, transfer, last_wire_s, at_s, size = _VERIFIED.unpack(data)
        return Verified(transfer=TransferId(transfer), last_wire_s=last_wire_s, verified_at_s=at_s, bytes=size)
    if kind == _SENT_KIND:
        _, transfer, size = _SENT.unpack(data)
        return SendCompleted(transfer=TransferId(transfer), bytes=size)
    transfer = TransferId(_TRANSFER.unpack_from(data)[1])
    reason = data[_TRANSFER.size :].decode()
    if kind == _EXPECTED:
        return Expected(transfer)
    if kind == _FAILED:
        return Failed(transfer=transfer, reason=reason)
    if kind == _SEND_FAILED:
        return SendFailed(transfer=transfer, reason=reason)
    if kind == _QUIESCED:
        return Quiesced(transfer=transfer)
    raise ValueError(f"a report of unknown kind {kind}")


def _that_fit(links: Iterable[LinkInfo]) -> Iterator[w.LinkReport]:
    """The first links, as many as one report holds: a worker of a large cluster has thousands."""
    left = MAX_LINKS_BYTES
    for message in map(link_to_wire, links):
        left -= message.ByteSize() + 8  # overhead of protobuf for a row
        if left < 0:
            return
        yield message
