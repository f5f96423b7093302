"""Configuration as frozen dataclasses, with every default in one place.

`ClusterConfig` holds `cluster.toml` and the flags of `clusterctl up`. Launchers derive one `RouterConfig` and one
`WorkerConfig` a process from it and hand them over as files; processes read nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from tandem.core.bounds import Bound
from tandem.core.output_format_names import ReasoningField, ReasoningFormatName, ToolFormatName
from tandem.core.state_enums import RoleName

Count = Annotated[int, Bound(0)]
Positive = Annotated[int, Bound(1)]
Amount = Annotated[float, Bound(0)]
Above = Annotated[float, Bound(0, is_above=True)]
Share = Annotated[float, Bound(0, 1)]
DEFAULT_CLUSTER = "tandem"
DEFAULT_PORT = 8000
ENGINES = ("model", "sim")
"""Values of `engine`: compute the model, or arithmetic in its place."""


class Anonymous(StrEnum):
    """When requests without an API key are accepted. LOOPBACK: while the API listens on loopback and there is no
    key."""

    LOOPBACK = "loopback"
    ALWAYS = "always"
    NEVER = "never"


class Disaggregation(StrEnum):
    """ALWAYS: every answer of more than one token is handed over. NEVER: one worker does both. AUTO: the cheaper
    one."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class LauncherName(StrEnum):
    """Launcher of workers: `clusterctl up` on its own machine, or Ray on all that have joined (docs/ray.md)."""

    LOCAL = "local"
    RAY = "ray"


class PlannerMode(StrEnum):
    """Use of a planner's decision: none is made, it is only reported, or it is carried out (docs/planning.md)."""

    OFF = "off"
    ADVISE = "advise"
    ACT = "act"


class PolicyName(StrEnum):
    """Routing policy: by cost in seconds, or for comparison by other known rules (docs/routing.md)."""

    COST = "cost"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    PREFIX_ONLY = "prefix_only"
    DYNAMO = "dynamo"
    LLM_D = "llm_d"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """`[model]`: a local folder, GGUF file, name or hub id; "" means the default one.

    `max_model_len` 0 = what the model allows. `chat_template`: a file to use in place of the model's own template.
    `quantize`: a format of weights made at load, "auto" or "none" (docs/models.md). `quantize_calibration`: a text file
    that workers can read; quantised weights are calibrated with it, "" = with a text of the engine.
    """

    path: str = ""
    revision: str = ""
    served_names: tuple[str, ...] = ()
    dtype: str = "auto"
    max_model_len: Count = 0
    chat_template: str = ""
    tool_format: ToolFormatName = ToolFormatName.AUTO
    reasoning_format: ReasoningFormatName = ReasoningFormatName.AUTO
    quantize: str = "none"
    quantize_calibration: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSection:
    """`[pools]`: how many workers of each role compute `[model]`."""

    prefill: Count = 0
    decode: Count = 0
    mixed: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherModelSection(ModelSection):
    """`[[models]]`: a model beside `[model]`, with workers of its own. All three counts 0 = one pair."""

    prefill: Count = 0
    decode: Count = 0
    mixed: Count = 0

    @property
    def pools(self) -> PoolSection:
        return PoolSection(prefill=self.prefill, decode=self.decode, mixed=self.mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSection:
    """`[worker.sim]`: times of the simulated engine. 0 = as fast as it can."""

    prefill_tokens_per_s: Amount = 0.0
    prefill_step_s: Amount = 0.0
    """Added to a step that computes any part of a prompt."""
    prefill_context_s: Amount = 0.0
    """Added for every pair of a prompt's token and one before it."""
    decode_step_s: Amount = 0.0
    decode_sequence_s: Amount = 0.0
    """Added to a decode step for every sequence in it."""
    decode_context_s: Amount = 0.0
    """Added to a decode step for every token of context of the sequences in it."""


SIM_KV_BYTES = 256 << 20
"""KV of a sim engine with automatic size: trials need no more, and have many workers on a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSection:
    """`[prefill]`, `[decode]`, `[mixed]`: settings of workers of one role that differ from `[worker]`; None = the
    same."""

    tp: Positive | None = None
    hardware: str | None = None
    block_tokens: Positive | None = None
    kv_dtype: str | None = None
    kv_memory_bytes: Count | None = None
    threads: Count | None = None
    device: str | None = None
    transport: str | None = None
    peak_flops_per_s: Amount | None = None
    peak_bytes_per_s: Amount | None = None


class SpeculationMode(StrEnum):
    """Text that tokens are drafted from, beside grammars. OFF: none. PREDICTION: the client's own prediction. COPY:
    that, and the prompt and the answer itself."""

    OFF = "off"
    PREDICTION = "prediction"
    COPY = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSection:
    """`[worker]`: settings of every worker. `threads` 0 = cores divided by ranks, at least 1.

    `kv_memory_bytes` 0 = automatic: `automatic_kv_share` of the memory beside weights and steps (AutomaticKV). On a CPU
    a worker then plans with `memory_bytes`, 0 = the free memory, shared by the workers of the machine.

    `engine`: "model" computes, "sim" writes, moves and reads back KV by arithmetic, without weights. `kv_dtype` "auto"
    = the compute dtype. `wire_codec` ("int8", "fp8", "" = none) compresses KV on links that were measured below
    `wire_codec_below_bytes_per_s`. `transports` are those that a worker listens on; empty = all that work here.
    `hardware` is the class of nodes that it may be placed on; "any" = all. `peak_flops_per_s` and `peak_bytes_per_s`
    (of memory) are the data sheet's figures of one rank's accelerator; 0 = unknown. A step that takes longer than
    `step_slow_s` takes the worker out of rotation until it ends, one that takes longer than `step_watchdog_s` ends the
    worker. `swap_memory_bytes` is host memory for the KV of preempted requests of a GPU; 0 = they are computed again.
    Without `has_cuda_graphs` a GPU's decode steps are launched kernel by kernel.
    """

    engine: str = "model"
    tp: Positive = 1
    hardware: str = "any"
    kv_dtype: str = "auto"
    wire_codec: str = ""
    wire_codec_below_bytes_per_s: Annotated[float, Bound(0, math.inf)] = 125e6
    transports: tuple[str, ...] = ()
    sim: SimSection = field(default_factory=SimSection)
    device: str = "auto"
    kv_memory_bytes: Count = 0
    automatic_kv_share: Annotated[float, Bound(0, 1, is_above=True)] = 0.5
    memory_bytes: Count = 0
    swap_memory_bytes: Count = 1024 * 1024 * 1024
    has_cuda_graphs: bool = True
    block_tokens: Positive = 16
    is_deterministic: bool = False
    threads: Count = 0
    max_step_tokens: Positive = 512
    chunk_tokens: Positive = 512
    max_step_s: Annotated[float, Bound(0, is_above=True)] = 0.2
    max_sequences: Positive = 64
    speculation: SpeculationMode = SpeculationMode.PREDICTION
    queue_stretch: Amount = 10.0
    queue_max_overtake_s: Amount = 60.0
    layer_group: Count = 0
    transport: str = "auto"
    step_slow_s: Annotated[float, Bound(0.5)] = 10.0
    step_watchdog_s: Annotated[float, Bound(1)] = 60.0
    peak_flops_per_s: Amount = 0.0
    peak_bytes_per_s: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSection:
    """`[router]`: the API server. Ports: 0 = any free one; `grpc_port` and `admin_port` −1 = the port before + 1.
    `processes` share the ports. `tls_cert` and `tls_key` are PEM files."""

    host: str = "127.0.0.1"
    port: Annotated[int, Bound(0, 65535)] = DEFAULT_PORT
    grpc_port: Annotated[int, Bound(-1, 65535)] = -1
    admin_port: Annotated[int, Bound(-1, 65535)] = -1
    processes: Annotated[int, Bound(1, 256)] = 1
    tls_cert: str = ""
    tls_key: str = ""
    anonymous: Anonymous = Anonymous.LOOPBACK
    disaggregation: Disaggregation = Disaggregation.AUTO
    policy: PolicyName = PolicyName.COST
    reasoning_field: ReasoningField = ReasoningField.REASONING_CONTENT
    max_body_bytes: Positive = 4 * 1024 * 1024
    request_timeout_s: Annotated[float, Bound(0, is_above=True)] = 600.0
    drain_s: Amount = 10.0
    slow_reader_backlog_bytes: Positive = 4 * 1024 * 1024
    index_memory_bytes: Annotated[int, Bound(1024 * 1024)] = 512 * 1024 * 1024
    max_attempts: Positive = 4
    retry_burst: Count = 1000
    retry_ratio: Amount = 0.2
    retry_per_s: Amount = 10.0
    worker_wait_s: Amount = 10.0
    stall_s: Amount = 30.0
    breaker_failures: Count = 5
    breaker_open_s: Amount = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSection:
    """`[slo.<class>]`: latency objectives of requests of one class; 0 = none."""

    ttft_s: Amount = 0.0
    itl_s: Amount = 0.0


SLO_NAME = r"[A-Za-z0-9._-]{1,64}"
"""Regular expression of names for a class that is added while the cluster runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSection:
    """`[admission]`: which requests wait in a router, and for what. See docs/tenants.md."""

    max_waiting: Positive = 1024
    quantum_tokens: Positive = 64
    saved_tokens: Count = 2048
    worker_queue_s: Amount = 0.05
    worker_queue_requests: Positive = 2
    default_slo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSection:
    """`[budget.<tenant>]`: a tenant's limits; 0 = unlimited. `[budget."*"]`: every other tenant."""

    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSection:
    """`[redis]`: "" = start a private server, which refuses writes beyond `memory_bytes` (0 = no bound). `volatile_url`
    may be a second server."""

    url: str = ""
    volatile_url: str = ""
    memory_bytes: Count = 2 * 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSection:
    """`[store]`: files that clients leave with the cluster. `dir`: shared by all routers; "" = a folder beside its
    state."""

    dir: str = ""
    response_expiry_s: Annotated[float, Bound(1)] = 7 * 86_400.0
    max_response_bytes: Positive = 4 * 1024 * 1024
    max_tenant_response_bytes: Positive = 128 * 1024 * 1024
    file_expiry_s: Annotated[float, Bound(3600)] = 30 * 86_400.0
    max_file_bytes: Positive = 200 * 1024 * 1024
    max_tenant_file_bytes: Positive = 4 * 1024 * 1024 * 1024
    min_free_bytes: Count = 512 * 1024 * 1024
    max_batch_requests: Positive = 50_000
    max_tenant_open_batches: Positive = 100
    batch_requests_at_once: Positive = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RayClusterSection:
    """`[ray.raycluster]`: KubeRay's RayCluster that `up` runs in and may resize; `name` "" = none.

    `account`: folder with token and ca.crt of a service account. `prefill`, `decode`, `mixed`: the group with nodes for
    workers of that role, "" = none.
    """

    name: str = ""
    namespace: str = ""
    api: str = "https://kubernetes.default.svc"
    account: str = ""
    prefill: str = ""
    decode: str = ""
    mixed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySection:
    """`[ray]`: for `launcher = "ray"`. `address` "" = a head is started, at `head_port` (0 = any free one).

    `host` "" = the address that Ray finds. `cpus` 0 = all cores; `hardware` is the class of the head's machine.
    """

    address: str = ""
    token_file: str = ""
    host: str = ""
    head_port: Annotated[int, Bound(0, 65535)] = 6380
    cpus: Count = 0
    hardware: str = "any"
    place_timeout_s: Annotated[float, Bound(1, 240)] = 120.0
    raycluster: RayClusterSection = field(default_factory=RayClusterSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSection:
    """`[planner]`: if and when the split of the workers follows the load. See docs/planning.md.

    `budget`: most workers, 0 = as many as there are.
    """

    mode: PlannerMode = PlannerMode.OFF
    interval_s: Annotated[float, Bound(0.1, 10)] = 5.0
    window_s: Above = 60.0
    min_requests: Positive = 30
    min_gain: Share = 0.03
    headroom: Above = 1.1
    confirmations: Positive = 2
    worth_s: Amount = 10.0
    cool_down_s: Amount = 30.0
    most_at_once: Share = 0.25
    budget: Count = 0
    target: Share = 0.95
    is_scaling: bool = False
    spare_headroom: Above = 1.5
    spare_confirmations: Positive = 10
    is_mixed_allowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSection:
    """`[price]`: cost of an hour of one rank of a worker of each role, in any unit; 0 = not given."""

    prefill: Amount = 0.0
    decode: Amount = 0.0
    mixed: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSection:
    """`[tracing]`: which requests routers trace, and where spans go, by OTLP over HTTP; `endpoint` "" = nowhere, unless
    the environment sets it. See docs/operate/tracing.md."""

    endpoint: str = ""
    sample_ratio: Share = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A whole cluster. `state_dir` "" = a folder for this cluster name under the user's state directory. `log_format`:
    text or json; "" = from the environment, else text. `max_ranks`: never more ranks of workers than that at once; 0 =
    no bound. `replace_silent_s`: a worker that fell silent is started anew after so long; 0 = never. `patience`: all
    bounds on silence are so many times as long, for debuggers; 0 = from the environment, else 1."""

    name: str = DEFAULT_CLUSTER
    state_dir: str = ""
    log_level: str = "INFO"
    log_format: str = ""
    max_ranks: Count = 0
    replace_silent_s: Amount = 60.0
    patience: Annotated[float, Bound(0, 3600)] = 0.0
    launcher: LauncherName = LauncherName.LOCAL
    model: ModelSection = field(default_factory=ModelSection)
    models: tuple[FurtherModelSection, ...] = ()
    pools: PoolSection = field(default_factory=PoolSection)
    worker: WorkerSection = field(default_factory=WorkerSection)
    prefill: RoleSection = field(default_factory=RoleSection)
    decode: RoleSection = field(default_factory=RoleSection)
    mixed: RoleSection = field(default_factory=RoleSection)
    router: RouterSection = field(default_factory=RouterSection)
    admission: AdmissionSection = field(default_factory=AdmissionSection)
    slo: dict[str, SloSection] = field(default_factory=dict)
    budget: dict[str, BudgetSection] = field(default_factory=dict)
    redis: RedisSection = field(default_factory=RedisSection)
    store: StoreSection = field(default_factory=StoreSection)
    ray: RaySection = field(default_factory=RaySection)
    planner: PlannerSection = field(default_factory=PlannerSection)
    price: PriceSection = field(default_factory=PriceSection)
    tracing: TracingSection = field(default_factory=TracingSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process, as a launcher starts it. `model_dir` is a resolved local folder or GGUF file,
    `commit` that of the hub or "", `revision` what the desired state calls its model and settings together."""

    cluster: str
    worker_id: str
    role: RoleName
    pool: str
    model: str
    model_dir: str
    revision: str
    dtype: str
    max_model_len: int
    redis_url: str
    secret_file: str
    runtime_dir: str
    host: str = "127.0.0.1"
    port: int = 0
    commit: str = ""
    log_level: str = "INFO"
    log_format: str = "text"
    quantize: str = "none"
    quantize_calibration: str = ""
    settings: WorkerSection = field(default_factory=WorkerSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as routers serve it. `name` is the one that its workers report; clients use the `served_names`."""

    name: str
    model_dir: str
    served_names: tuple[str, ...]
    chat_template: str = ""
    tool_format: ToolFormatName = ToolFormatName.AUTO
    reasoning_format: ReasoningFormatName = ReasoningFormatName.AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router process, as a launcher starts it."""

    cluster: str
    router_id: str
    models: tuple[ServedModel, ...]
    redis_url: str
    secret_file: str
    admin_key_file: str
    ready_file: str
    """Written (atomically, JSON with the actual ports) once the sockets listen."""
    is_part: bool = False
    """True for one of several processes that share ports and have a parent that supervises them."""
    parent_admin: str = ""
    """URL of that parent's admin port."""
    has_rollouts: bool = True
    """True if rollouts may be requested. False where workers are started elsewhere: that launcher may replace them,
    too."""
    log_level: str = "INFO"
    log_format: str = "text"
    settings: RouterSection = field(default_factory=RouterSection)
    admission: AdmissionSection = field(default_factory=AdmissionSection)
    slo: dict[str, SloSection] = field(default_factory=dict)
    budget: dict[str, BudgetSection] = field(default_factory=dict)
    store: StoreSection = field(default_factory=StoreSection)
    planner: PlannerSection = field(default_factory=PlannerSection)
    price: PriceSection = field(default_factory=PriceSection)
    tracing: TracingSection = field(default_factory=TracingSection)
