"""The shapes of documents about routes, promises and keys; see kinds.py."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class RoutingPolicy(TypedDict):
    policy: str
    policies: list[str]


class RoutingCost(TypedDict):
    queue_s: float
    compute_s: float
    move_s: float
    room_s: float
    decode_s: float
    others_s: float
    broken_s: float
    reuse_s: float
    total_s: float


class RoutingOption(TypedDict):
    prefill: str | None
    decode: str
    score: float
    cost: NotRequired[RoutingCost]


class PrefixSource(TypedDict):
    worker: str
    tokens: int


class RoutedWorker(TypedDict):
    worker: str
    role: str
    queued_tokens: int
    queued_requests: int
    in_flight: int
    decoding: int
    held_tokens: int
    reusable_tokens: int
    free_blocks: int
    total_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    decode_sequence_s: float


class RoutingDecision(TypedDict):
    prompt_tokens: int
    max_tokens: int
    policy: str
    prefill: str | None
    decode: str
    reason: str
    prefill_hit_tokens: int
    decode_hit_tokens: int
    sources: list[PrefixSource]
    options: list[RoutingOption]
    workers: list[RoutedWorker]


class SloClass(TypedDict):
    slo: str
    ttft_s: float
    itl_s: float


class SloClasses(TypedDict):
    classes: list[SloClass]
    default_slo: str


class KeyFacts(TypedDict):
    id: str
    tenant: str
    scopes: list[str]
    created_s: int
    expires_s: int | None
    is_expired: bool
    slo: str
    priority: int
    name: str


class ApiKeys(TypedDict):
    """`revoked`: ids of the last 1,000. `anonymous`: the setting; `is_open`: requests without a key are let in now."""

    keys: list[KeyFacts]
    revoked: list[str]
    anonymous: Literal["loopback", "always", "never"]
    is_open: bool


class ApiKeyDocument(KeyFacts):
    key: str


API = (RoutingPolicy, RoutingDecision, SloClasses, ApiKeys, ApiKeyDocument)
