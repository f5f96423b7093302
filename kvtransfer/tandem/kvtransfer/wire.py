"""A worker's KV profile between protobuf and its dataclass. The only module here that needs protobuf."""

from __future__ import annotations

from tandem.core.ids import GroupId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.rpc.v1 import worker_pb2 as w


def profile_to_wire(profile: KVProfile) -> w.KvProfile:
    return w.KvProfile(
        fingerprint=profile.fingerprint,
        identity=dict(profile.identity),
        groups=[
            w.KvGroup(
                layers=g.layers,
                planes=g.planes,
                heads=g.heads,
                width=g.width,
                block_tokens=g.block_tokens,
                dtype=g.dtype,
                window=g.window,
                is_replicated=g.is_replicated,
            )
            for g in profile.layout.groups
        ],
        tp=profile.layout.tp,
        protocol_major=profile.protocol[0],
        protocol_minor=profile.protocol[1],
        codecs=profile.codecs,
        transports=profile.transports,
        offers=profile.offers,
        offers_below_bytes_per_s=profile.offers_below_bytes_per_s,
        revision=profile.revision,
    )


def profile_from_wire(m: w.KvProfile) -> KVProfile:
    groups = tuple(
        KVGroupSpec(
            group=GroupId(index),
            layers=tuple(g.layers),
            planes=g.planes,
            heads=g.heads,
            width=g.width,
            block_tokens=g.block_tokens,
            dtype=g.dtype,
            window=g.window if g.HasField("window") else None,
            is_replicated=g.is_replicated,
        )
        for index, g in enumerate(m.groups)
    )
    return KVProfile(
        fingerprint=m.fingerprint,
        identity=tuple(sorted(m.identity.items())),
        layout=KVLayout(groups=groups, tp=m.tp or 1),
        protocol=(m.protocol_major, m.protocol_minor),
        codecs=tuple(m.codecs),
        transports=tuple(m.transports),
        offers=tuple(m.offers),
        offers_below_bytes_per_s=m.offers_below_bytes_per_s,
        revision=m.revision,
    )
