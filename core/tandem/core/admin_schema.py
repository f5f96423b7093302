"""Documents of a router's admin port: routers fill them in, and `clusterctl` prints them or makes its own of them.

Keys stay; new ones may come. Seconds end in `_s`, numbers of 64 bits are texts, and `None` is an unknown value.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from tandem.core.output_grammar import ConstraintKind


def copied(shape: type, *sources: object, **own: Any) -> dict[str, Any]:
    """A document of `shape`: `own` values, and for every other key the attribute of the first source that has it."""
    return {key: own[key] if key in own else _attribute(key, sources) for key in shape.__annotations__}


def _attribute(name: str, sources: tuple[object, ...]) -> Any:
    for source in sources:
        if hasattr(source, name):
            return getattr(source, name)
    raise AttributeError(name)


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


class RoutingPlan(TypedDict):
    policy: str
    prefill: str | None
    decode: str
    reason: str
    prefill_hit_tokens: int
    decode_hit_tokens: int
    sources: list[PrefixSource]
    options: list[RoutingOption]


class Constraint(TypedDict):
    """The kind of grammar that an answer follows, and the field of the request that asked for it."""

    kind: ConstraintKind
    param: str


class RoutingDecision(RoutingPlan):
    constraint: Constraint | None
    prompt_tokens: int
    max_tokens: int
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


class TraceSpan(TypedDict):
    span: Literal["wait", "queue", "prefill", "transfer", "decode"]
    worker: str
    attempt: int
    start_s: float
    end_s: float


class TraceMoment(TypedDict):
    at_s: float
    attempt: int
    what: str
    prefill: str
    decode: str
    why: str


class TraceSummary(TypedDict):
    request: str
    router: str
    model: str
    outcome: str
    is_over: bool
    error: str
    reason: str
    began_at_s: float
    duration_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    constraint: Constraint | None
    attempts: int
    handoff: dict[str, float] | None
    spans: list[TraceSpan]


class TraceDocument(TraceSummary):
    moments: list[TraceMoment]


class ServedModelDocument(TypedDict):
    model: str
    served_names: list[str]


class RouterProcessDocument(TypedDict):
    id: str
    is_ready: bool
    pid: int
    incarnation: NotRequired[str]
    in_flight: NotRequired[int]
    trouble: NotRequired[str]


class RouterStatus(TypedDict):
    id: str
    incarnation: str
    in_flight: int
    http: int
    grpc: int
    admin: int
    host: str
    pid: int
    processes: NotRequired[list[RouterProcessDocument]]


class TenantQueue(TypedDict):
    tenant: str
    waiting: int
    longest_s: float
    predicted_wait_s: float | None


class ModelQueue(TypedDict):
    model: str
    waiting: int
    waiting_tokens: int
    tokens_per_s: float | None
    predicted_wait_s: float | None
    classes: dict[str, int]
    tenants: list[TenantQueue]


class AdmissionStatus(TypedDict):
    waiting: int
    refused: dict[str, int]
    models: list[ModelQueue]


class BlockCounts(TypedDict):
    """Blocks of one KV group by state."""

    group: int
    total: int
    free: int
    cached: int
    request: int
    pushing: int
    reserved: int


class ReportedWorker(TypedDict, total=False):
    """Keys that a worker reports; absent until it is connected."""

    role: str
    model: str
    fingerprint: str
    revision: str
    tp: int
    kv_dtype: str
    block_tokens: int
    max_model_len: int
    num_blocks: list[int]
    transports: list[str]
    protocol: str
    codecs: list[str]
    wire_codec: str
    wire_codec_below_bytes_per_s: float
    pid: int
    rank_pids: list[int]
    in_flight: int
    queued_requests: int
    running_requests: int
    queued_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    blocks: list[BlockCounts]
    counters: dict[str, float]


class WorkerStatus(ReportedWorker):
    worker: str
    address: str
    incarnation: str
    is_connected: bool
    is_registered: bool
    trouble: str
    router_in_flight: int
    version: str
    clock_skew_s: float | None
    state: str
    breaker: NotRequired[Literal["closed", "half_open", "open"]]


class Pair(TypedDict):
    prefill: str
    decode: str
    form: str


class RefusedPair(TypedDict):
    prefill: str
    decode: str
    why: str


class RouterStatusPage(TypedDict):
    """One router's view of its cluster."""

    cluster: str
    model: str
    served_names: list[str]
    models: list[ServedModelDocument]
    version: str
    disaggregation: str
    policy: str
    is_ready: bool
    missing: list[str]
    registry_trouble: str
    router: RouterStatus
    admission: AdmissionStatus
    workers: list[WorkerStatus]
    pairs: list[Pair]
    refused_pairs: list[RefusedPair]


class HostedWorker(TypedDict):
    worker: str
    role: str
    host: str


class AuditedGroup(BlockCounts):
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
