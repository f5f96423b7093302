"""A worker's KV profile between protobuf and its dataclass. The only module here that needs protobuf."""

from __future__ import annotations

from tandem.core.ids import GroupId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.proto_mapping import from_proto, to_proto
from tandem.rpc.v1 import worker_pb2 as w


def profile_to_wire(profile: KVProfile) -> w.KvProfile:
    major, minor = profile.protocol
    return to_proto(
        w.KvProfile,
        profile,
        identity=dict(profile.identity),
        groups=[to_proto(w.KvGroup, spec) for spec in profile.layout.groups],
        tp=profile.layout.tp,
        protocol_major=major,
        protocol_minor=minor,
    )


def profile_from_wire(m: w.KvProfile) -> KVProfile:
    groups = tuple(from_proto(KVGroupSpec, spec, group=GroupId(index)) for index, spec in enumerate(m.groups))
    return from_proto(
        KVProfile,
        m,
        identity=tuple(sorted(m.identity.items())),
        layout=KVLayout(groups=groups, tp=m.tp or 1),
        protocol=(m.protocol_major, m.protocol_minor),
    )
