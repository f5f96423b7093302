"""The shapes of documents about the state and activity of a cluster, and where its KV is; see kinds.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from tandem.core.admin_schema import AuditedWorker, HostedWorker, RouterStatusPage, Unanswered
from tandem.core.link_speed import LinkSpeed, ReportedLink


class VersionDocument(TypedDict):
    client: str
    python: str
    cluster: str | None


class PoolStatus(TypedDict):
    model: str
    role: str
    wanted: NotRequired[int]
    workers: int
    ready: int
    running_requests: int
    queued_requests: int
    queued_tokens: int
    kv_share: float | None


class FiguresDocument(TypedDict):
    requests: int
    prompt_tokens: int
    output_tokens: int
    hit_share: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    reattempts: int


class Warned(TypedDict):
    what: str
    fix: str


class Status(RouterStatusPage):
    health: Literal["ok", "degraded", "down"]
    pools: list[PoolStatus]
    figures: FiguresDocument
    warnings: list[Warned]


class TopWorker(TypedDict):
    worker: str
    role: str
    state: str
    running_requests: int
    queued_requests: int
    queued_tokens: int
    kv_share: float | None
    prefill_tokens_per_s: float
    decode_step_s: float


class Top(TypedDict):
    cluster: str
    health: str
    window_s: float | None
    requests_per_s: float | None
    output_tokens_per_s: float | None
    in_flight: int
    waiting: int
    figures: FiguresDocument
    pools: list[PoolStatus]
    workers: list[TopWorker]


@dataclass(frozen=True, kw_only=True)
class MeasuredLink(LinkSpeed):
    is_used: bool


@dataclass(frozen=True, kw_only=True)
class UsedLinkDocument(ReportedLink):
    worker: str


class NetDocument(TypedDict):
    workers: list[HostedWorker]
    measured: list[MeasuredLink]
    links: list[UsedLinkDocument]


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


INSPECTING = (VersionDocument, Status, Top, NetDocument, KvAudit)
