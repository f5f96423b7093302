"""The shapes of documents about where KV is and how it travels; see kinds.py."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class HostedWorker(TypedDict):
    worker: str
    role: str
    host: str


class MeasuredLink(TypedDict):
    from_host: str
    to_host: str
    transport: str
    peer: str
    bytes_per_s: float
    latency_s: float
    age_s: float
    failure: str
    is_used: bool


class UsedLinkDocument(TypedDict):
    worker: str
    rank: int
    peer: str
    peer_rank: int
    transport: str
    from_host: str
    to_host: str
    bytes_per_s: float
    latency_s: float
    achieved_bytes_per_s: float
    stalls: int
    reason: str
    unused: list[str]


class NetDocument(TypedDict):
    workers: list[HostedWorker]
    measured: list[MeasuredLink]
    links: list[UsedLinkDocument]


class AuditedGroup(TypedDict):
    group: int
    total: int
    free: int
    cached: int
    request: int
    pushing: int
    reserved: int
    explained: int


class AuditedIndex(TypedDict):
    held_blocks: int
    known_blocks: int
    is_equal: bool


class AuditedWorker(TypedDict):
    worker: str
    incarnation: str
    role: str
    requests: int
    sending: int
    receiving: int
    groups: list[AuditedGroup]
    index: NotRequired[AuditedIndex]


class Unanswered(TypedDict):
    worker: str
    why: str


class KvAudit(TypedDict):
    """`would_release`: what --repair would ask for, with --dry-run."""

    took_s: float
    router: str
    workers: list[AuditedWorker]
    unanswered: list[Unanswered]
    holds: list[dict[str, Any]]
    unexplained: list[dict[str, Any]]
    would_release: list[dict[str, Any]]
    released: list[dict[str, Any]]
    refused: list[dict[str, Any]]


TRANSFER = (NetDocument, KvAudit)
