"""Link measurements and links in use between protobuf and the records of `core` and `kvtransfer`. No logic, no I/O."""

from __future__ import annotations

from tandem.core.ids import Rank, WorkerId
from tandem.core.link_speed import LinkSpeed
from tandem.kvtransfer.peer_link import LinkInfo
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w


def speed_to_wire(speed: LinkSpeed) -> e.LinkMeasured:
    return e.LinkMeasured(
        from_host=speed.from_host,
        to_host=speed.to_host,
        peer=speed.peer,
        transport=speed.transport,
        bytes_per_s=speed.bytes_per_s,
        latency_s=speed.latency_s,
        age_s=speed.age_s,
        failure=speed.failure,
    )


def speed_from_wire(m: e.LinkMeasured) -> LinkSpeed:
    return LinkSpeed(
        from_host=m.from_host,
        to_host=m.to_host,
        peer=m.peer,
        transport=m.transport,
        bytes_per_s=m.bytes_per_s,
        latency_s=m.latency_s,
        age_s=m.age_s,
        failure=m.failure,
    )


def link_to_wire(link: LinkInfo) -> w.LinkReport:
    return w.LinkReport(
        rank=link.from_rank,
        peer=link.worker,
        peer_rank=link.rank,
        transport=link.transport,
        from_host=link.from_host,
        to_host=link.to_host,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        achieved_bytes_per_s=link.achieved_bytes_per_s,
        stalls=link.stalls,
        reason=link.reason,
        unused=link.unused,
    )


def link_from_wire(m: w.LinkReport) -> LinkInfo:
    return LinkInfo(
        worker=WorkerId(m.peer),
        rank=Rank(m.peer_rank),
        from_rank=Rank(m.rank),
        transport=m.transport,
        reason=m.reason,
        stalls=m.stalls,
        from_host=m.from_host,
        to_host=m.to_host,
        bytes_per_s=m.bytes_per_s,
        latency_s=m.latency_s,
        achieved_bytes_per_s=m.achieved_bytes_per_s,
        unused=tuple(m.unused),
    )
