"""The shape of every document that `clusterctl -o json` prints, by kind. `schema` gives it as JSON Schema.

Keys stay; new ones may come. A test holds every kind against what the command really prints. Seconds end in `_s`,
numbers of 64 bits are texts, and `None` is what nobody knows.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired, TypedDict

from tandem.clusterctl.changing_documents import CHANGING
from tandem.clusterctl.planned_documents import PLANNED
from tandem.clusterctl.report_documents import REPORTS


class Version(TypedDict):
    client: str
    python: str
    cluster: str | None


# ---- status --------------------------------------------------------------------------------------------------------


class ServedModel(TypedDict):
    model: str
    served_names: list[str]


class RouterProcess(TypedDict):
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
    processes: NotRequired[list[RouterProcess]]


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
    group: int
    total: int
    free: int
    cached: int
    request: int
    pushing: int
    reserved: int


class WorkerStatus(TypedDict):
    """What a worker that has not connected yet has not said is not there."""

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
    role: NotRequired[str]
    model: NotRequired[str]
    fingerprint: NotRequired[str]
    revision: NotRequired[str]
    tp: NotRequired[int]
    kv_dtype: NotRequired[str]
    block_tokens: NotRequired[int]
    max_model_len: NotRequired[int]
    num_blocks: NotRequired[list[int]]
    transports: NotRequired[list[str]]
    protocol: NotRequired[str]
    codecs: NotRequired[list[str]]
    wire_codec: NotRequired[str]
    wire_codec_below_bytes_per_s: NotRequired[float]
    pid: NotRequired[int]
    rank_pids: NotRequired[list[int]]
    in_flight: NotRequired[int]
    queued_requests: NotRequired[int]
    running_requests: NotRequired[int]
    queued_tokens: NotRequired[int]
    prefill_tokens_per_s: NotRequired[float]
    decode_step_s: NotRequired[float]
    blocks: NotRequired[list[BlockCounts]]
    counters: NotRequired[dict[str, float]]


class Pair(TypedDict):
    prefill: str
    decode: str
    form: str


class RefusedPair(TypedDict):
    prefill: str
    decode: str
    why: str


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


class Figures(TypedDict):
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


class Status(TypedDict):
    health: Literal["ok", "degraded", "down"]
    pools: list[PoolStatus]
    figures: Figures
    warnings: list[Warned]
    cluster: str
    model: str
    served_names: list[str]
    models: list[ServedModel]
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


# ---- top --------------------------------------------------------------------------------------


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
    figures: Figures
    pools: list[PoolStatus]
    workers: list[TopWorker]


# ---- net -----------------------------------------------------------------------------------------------------------


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


class UsedLink(TypedDict):
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


class Net(TypedDict):
    workers: list[HostedWorker]
    measured: list[MeasuredLink]
    links: list[UsedLink]


# ---- kv audit ------------------------------------------------------------------------------------------------------


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
    took_s: float
    router: str
    workers: list[AuditedWorker]
    unanswered: list[Unanswered]
    holds: list[dict[str, Any]]
    unexplained: list[dict[str, Any]]
    released: list[dict[str, Any]]
    refused: list[dict[str, Any]]


# ---- route, slo, key -----------------------------------------------------------------------------------------------


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
    keys: list[KeyFacts]


class ApiKey(KeyFacts):
    key: str


KINDS: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        Version, Status, Top, Net, KvAudit, RoutingPolicy, RoutingDecision, SloClasses, ApiKeys, ApiKey, *REPORTS,
        *CHANGING, *PLANNED,
    )
}  # fmt: skip
"""Kind → what stands in its documents beside `apiVersion` and `kind`."""


def schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a document of `kind`; KeyError if there is none. Of all that it knows, nothing else may stand
    there."""
    import msgspec

    from tandem.clusterctl.output import API_VERSION

    (found,), parts = msgspec.json.schema_components((KINDS[kind],))
    top = parts.pop(found["$ref"].rpartition("/")[2])
    head = {"apiVersion": {"const": API_VERSION}, "kind": {"const": kind}}
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **top,
        "properties": {**head, **top["properties"]},
        "required": [*head, *top["required"]],
        "$defs": parts,
    }
    for part in (whole, *parts.values()):
        part["additionalProperties"] = False
    return whole
