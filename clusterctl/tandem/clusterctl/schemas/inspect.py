"""The shapes of documents about the state and activity of a cluster; see kinds.py."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class VersionDocument(TypedDict):
    client: str
    python: str
    cluster: str | None


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
    group: int
    total: int
    free: int
    cached: int
    request: int
    pushing: int
    reserved: int


class WorkerStatus(TypedDict):
    """Keys that a worker reports only once it is connected are absent until then."""

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


class Status(TypedDict):
    health: Literal["ok", "degraded", "down"]
    pools: list[PoolStatus]
    figures: FiguresDocument
    warnings: list[Warned]
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


LOOKING = (VersionDocument, Status, Top)
