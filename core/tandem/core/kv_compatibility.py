"""Decides if two workers can exchange KV blocks, and in which form. Pure; routers and workers use it.

Must be equal: what the fingerprint covers, the shape of every KV group, the protocol's major version, and the revision
of the desired state, so that a rollout never mixes old and new workers in one request. May differ: block size (frames
speak the receiver's blocks, the sender gathers for them), KV dtype (the sender converts), TP, codecs, transports as
long as one is shared, and the protocol's minor version (the smaller one is used).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import IntEnum

from tandem.core.errors import PairRefusedError
from tandem.core.kv_layout import DTYPE_BYTES, KVGroupSpec, KVLayout

PROTOCOL = (2, 0)
"""Major and minor version of the messages between workers, frames included. A message or a field that a receiver may
ignore raises the minor one, and goes only to peers with an agreed version that has it; all there is now is of 2.0."""


class Codec(IntEnum):
    """Encoding of a payload's numbers, as frames number it: in the receiver's dtype, or quantised with one scale a
    (block, layer, plane, head) (`tandem.kernels.kv_payload`)."""

    NONE = 0
    INT8 = 1
    FP8 = 2

    @property
    def label(self) -> str:
        """Its name in profiles, tickets and settings; "" = none."""
        return self.name.lower() if self else ""


CODECS = tuple(codec.label for codec in Codec if codec)
"""Wire codecs that this version can encode and decode."""
ALWAYS_BYTES_PER_S = 1e15
"""A speed that no link reaches: below it, a codec is offered without a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Identity of a served model: every field that changes KV bytes. `revision` is a hub commit, or for a folder a
    digest of its contents."""

    model: str
    revision: str
    rope: str
    adapter: str
    weight_quantisation: str
    compute_dtype: str
    tokenizer: str

    def digest(self) -> str:
        """32 hex characters; equal exactly when all fields are equal."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVProfile:
    """Properties of a worker's KV that the other end of a transfer must know before the first ticket.

    `identity` spells the fingerprint's fields out, so that a refusal can name the one that differs. `codecs` are those
    that it can encode and decode; `offers` (best first) those that it wants as a sender, on links that were measured
    below `offers_below_bytes_per_s`.
    """

    fingerprint: str
    identity: tuple[tuple[str, str], ...]
    layout: KVLayout
    revision: str = ""
    """As in the desired state; "" = it was given none, and it fits all."""
    protocol: tuple[int, int] = PROTOCOL
    codecs: tuple[str, ...] = CODECS
    transports: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    offers_below_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WireForm:
    """The form that both ends agreed on. `dtypes` has the receiver's dtype of every group: what the sender converts to.

    `codec` is "" or one of CODECS, `lossy` is the value that HashRoot.lossy of the receiver's copies must have ("" =
    exact). `protocol` is the version that both speak.
    """

    dtypes: tuple[str, ...]
    codec: str = ""
    lossy: str = ""
    protocol: tuple[int, int] = PROTOCOL


def refusal(sender: KVProfile, receiver: KVProfile) -> str:
    """Why `sender` can never push KV to `receiver`, and what to do about it; "" if it can."""
    if why := protocol_refusal(sender.protocol, receiver.protocol):
        return why
    if sender.revision and receiver.revision and sender.revision != receiver.revision:
        return f"revision differs: {sender.revision} and {receiver.revision}; workers of both never work together"
    if sender.fingerprint != receiver.fingerprint:
        return _identity_differs(sender, receiver)
    mine, theirs = sender.layout.groups, receiver.layout.groups
    if len(mine) != len(theirs):
        return f"KV groups differ: {len(mine)} and {len(theirs)}; both must serve one model"
    for a, b in zip(mine, theirs, strict=True):
        if _shape(a) != _shape(b):
            return f"KV group {a.group} differs in shape: {_shape(a)} and {_shape(b)}; both must serve one model"
        if min(a.block_tokens, b.block_tokens) < 1:
            return f"KV group {a.group} has blocks of {a.block_tokens} and {b.block_tokens} tokens; use 1 or more"
        if a.dtype != b.dtype and not {a.dtype, b.dtype} <= DTYPE_BYTES.keys():
            return f"KV dtype differs and cannot be converted: {a.dtype} and {b.dtype}; set one --kv-dtype for both"
    if sender.transports and receiver.transports and not set(sender.transports) & set(receiver.transports):
        ours, others = ", ".join(sender.transports), ", ".join(receiver.transports)
        return f"no common transport: {ours} and {others}; set one --transport for both, or auto"
    return ""


def agree(sender: KVProfile, receiver: KVProfile, *, offered: tuple[str, ...] = ()) -> WireForm:
    """The form in which blocks travel. `offered`: codecs that the sender offers for this link, best first.

    Raises PairRefusedError with the reason of `refusal`.
    """
    why = refusal(sender, receiver)
    if why:
        raise PairRefusedError("these workers cannot exchange KV blocks", why=why)
    return WireForm(
        dtypes=tuple(group.dtype for group in receiver.layout.groups),
        codec=_common_codec(sender, receiver, offered),
        lossy=lossy_name(sender, receiver, offered=offered),
        protocol=min(sender.protocol, receiver.protocol),
    )


def protocol_refusal(mine: tuple[int, int], theirs: tuple[int, int]) -> str:
    """Why two protocol versions, (major, minor), are incompatible; "" if they can use the smaller one."""
    if mine[0] == theirs[0]:
        return ""
    versions = f"{mine[0]}.{mine[1]} and {theirs[0]}.{theirs[1]}"
    return f"protocol differs: {versions}; major versions must be equal, update the older worker"


def offers_for(sender: KVProfile, link_bytes_per_s: float | None) -> tuple[str, ...]:
    """The codecs that `sender` offers for a link, best first; `link_bytes_per_s` is what was measured, None = nothing.

    An unmeasured link does not count as slow, unless the sender is set to compress always.
    """
    if sender.offers_below_bytes_per_s >= ALWAYS_BYTES_PER_S:
        return sender.offers
    is_slow = link_bytes_per_s is not None and link_bytes_per_s < sender.offers_below_bytes_per_s
    return sender.offers if is_slow else ()


def lossy_name(sender: KVProfile, receiver: KVProfile, *, offered: tuple[str, ...] = ()) -> str:
    """HashRoot.lossy of KV that `receiver` gets from `sender`: the changes to its bytes on the way; "" = none."""
    codec = _common_codec(sender, receiver, offered)
    return "+".join([*_conversions(sender, receiver), codec] if codec else _conversions(sender, receiver))


def describe(sender: KVProfile, receiver: KVProfile, *, offered: tuple[str, ...] = ()) -> str:
    """How blocks get from one to the other, for users; the two must be compatible. "exact" = bytes as they are, block
    by block."""
    ours, theirs = sender.layout.groups, receiver.layout.groups
    sizes = sorted({(a.block_tokens, b.block_tokens) for a, b in zip(ours, theirs, strict=True)})
    parts = [f"re-blocked {a} to {b}" for a, b in sizes if a != b]
    parts += [f"converted {change.replace('>', ' to ')}" for change in _conversions(sender, receiver)]
    if codec := _common_codec(sender, receiver, offered):
        parts.append(f"codec {codec}")
    return ", ".join(parts) or "exact"


def _common_codec(sender: KVProfile, receiver: KVProfile, offered: tuple[str, ...]) -> str:
    return next((name for name in offered if name in sender.codecs and name in receiver.codecs), "")


def _conversions(sender: KVProfile, receiver: KVProfile) -> list[str]:
    """`from>to` for every pair of dtypes that differ."""
    groups = zip(sender.layout.groups, receiver.layout.groups, strict=True)
    return sorted({f"{a.dtype}>{b.dtype}" for a, b in groups if a.dtype != b.dtype})


def _shape(group: KVGroupSpec) -> tuple[object, ...]:
    """layers, planes, heads, width, window, replicated."""
    return (len(group.layers), group.planes, group.heads, group.width, group.window, group.is_replicated)


def _identity_differs(sender: KVProfile, receiver: KVProfile) -> str:
    theirs = dict(receiver.identity)
    for name, value in sender.identity:
        if theirs.get(name) != value:
            other = theirs.get(name) or "none"
            return f"{name.replace('_', ' ')} differs: {value or 'none'} and {other}; both must serve the same model"
    return f"fingerprint differs: {sender.fingerprint} and {receiver.fingerprint}; both must serve the same model"
