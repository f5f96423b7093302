"""Every metric, once: its name, kind, labels and meaning. Workers report counters under these names in their load
reports; routers export them, and what they measure themselves. docs/metrics.md is made of this module.

A counter that has labels of its own travels under a key such as `tandem_kv_transfer_bytes_total{direction=sent}`
(see `counter_key`); the router adds `worker` and `role`. A key without the prefix gets it, and a `_total` behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tandem.core.metric import Metric as Metric
from tandem.core.metric import MetricKind as MetricKind
from tandem.core.metric import MetricSource as MetricSource

PREFIX = "tandem_"


def _request(kind: MetricKind, name: str, text: str, *labels: str) -> Metric:
    return Metric(MetricSource.REQUESTS, kind, name, text, *labels)


def _of_model(kind: MetricKind, name: str, text: str) -> Metric:
    return Metric(MetricSource.REQUESTS, kind, name, text, "model")


def _router(kind: MetricKind, name: str, text: str, *labels: str) -> Metric:
    return Metric(MetricSource.ROUTER, kind, name, text, *labels)


def _index(kind: MetricKind, name: str, text: str, *labels: str) -> Metric:
    return Metric(MetricSource.INDEX, kind, name, text, *labels)


def _cluster(kind: MetricKind, name: str, text: str, *labels: str) -> Metric:
    return Metric(MetricSource.CLUSTER, kind, name, text, *labels)


def _worker(kind: MetricKind, name: str, text: str, *labels: str) -> Metric:
    return Metric(MetricSource.WORKER, kind, name, text, "worker", "role", *labels)


def _moving(kind: MetricKind, name: str, text: str, *labels: str) -> Metric:
    return Metric(MetricSource.TRANSFER, kind, name, text, "worker", "role", *labels)


def _vllm(kind: MetricKind, name: str, text: str, *labels: str) -> Metric:
    return Metric(MetricSource.VLLM, kind, name, text, *labels)


_BY_WORKER = ("model_name", "worker", "role")
_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

# ---- requests, measured by routers ----
REQUESTS = _request(
    _COUNTER, "tandem_requests_total",
    'Requests by `api` and `outcome`: "ok", "cancelled" or the code of an error.', "api", "outcome",
)  # fmt: skip
TTFT = _of_model(_HISTOGRAM, "tandem_time_to_first_token_seconds", "From arrival to the first token.")
FIRST_CONTENT = _of_model(
    _HISTOGRAM, "tandem_time_to_first_content_seconds",
    "From arrival to the first text or call behind the reasoning, of models with a format of calls or reasoning.",
)  # fmt: skip
SECOND_TOKEN = _of_model(
    _HISTOGRAM, "tandem_time_to_second_token_seconds",
    "From the first token of a request to its second one: what a hand-off delays.",
)  # fmt: skip
ITL = _of_model(_HISTOGRAM, "tandem_inter_token_latency_seconds", "Between tokens of one choice.")
E2E = _of_model(
    _HISTOGRAM, "tandem_request_duration_seconds", "From arrival to the end of the answer, of those that got one."
)
QUEUE = _of_model(
    _HISTOGRAM, "tandem_request_queue_seconds", "From dispatch until a worker began to compute the prompt."
)
PREFILL = _of_model(
    _HISTOGRAM, "tandem_request_prefill_seconds", "From when a worker began with the prompt to the first token."
)
TRANSFER = _of_model(
    _HISTOGRAM, "tandem_request_transfer_seconds",
    "From the first token until the decode worker's first step with the request. What of the KV was pushed while the "
    "prompt was computed took no time of its own.",
)  # fmt: skip
DECODE = _of_model(
    _HISTOGRAM, "tandem_request_decode_seconds",
    "From the first token to the last one, of answers of more than one token; the transfer is part of it.",
)  # fmt: skip
HANDOFF_OVERHEAD = _of_model(
    _HISTOGRAM, "tandem_handoff_overhead_seconds", "What a hand-off from prefill to decode added to the second token."
)
PREDICTED_TTFT = _of_model(
    _HISTOGRAM, "tandem_predicted_time_to_first_token_seconds",
    "As the plan had it, from dispatch on; first attempts only.",
)  # fmt: skip
TTFT_ERROR = _of_model(
    _HISTOGRAM, "tandem_time_to_first_token_error_seconds", "How far that was from what came, without the sign."
)
PROMPT_TOKENS = _of_model(_COUNTER, "tandem_prompt_tokens_total", "Prompt tokens of requests that got an answer.")
GENERATED_TOKENS = _of_model(_COUNTER, "tandem_generation_tokens_total", "Output tokens.")
CACHED_TOKENS = _of_model(_COUNTER, "tandem_cached_prompt_tokens_total", "Prompt tokens that nobody had to compute.")
SLO_REQUESTS = _request(
    _COUNTER, "tandem_slo_requests_total",
    'Requests of an SLO class, by `slo` and `outcome`: "met" and "missed" its targets, "failed", "cancelled". Goodput '
    'is the rate of "met".', "slo", "outcome",
)  # fmt: skip
PREFIX_PREDICTED = _request(
    _COUNTER, "tandem_prefix_predicted_tokens_total",
    "Prompt tokens that the chosen worker was predicted to know, of every prompt whose worker said what it found.",
)  # fmt: skip
PREFIX_ACTUAL = _request(_COUNTER, "tandem_prefix_actual_tokens_total", "What it found.")
PREFIX_MISMATCHES = _request(
    _COUNTER, "tandem_prefix_mismatch_total",
    'Prompts where the two differ, by `basis` ("index": published blocks; "speculation": also blocks of prompts just '
    'sent) and `found` ("less" or "more" than predicted). "less" by the index is a stale hit.', "basis", "found",
)  # fmt: skip
RECOMPUTED_TOKENS = _request(
    _COUNTER, "tandem_recomputed_tokens_total",
    "Prompt and output tokens that an attempt had to compute again, because the one before, which had got as far as a "
    "first token, was lost; by `cause` as of re-attempts. What was found cached does not count.", "cause",
)  # fmt: skip

# ---- routers ----
ROUTER_IN_FLIGHT = _router(_GAUGE, "tandem_router_in_flight_requests", "Requests in flight in this router.")
ROUTER_PROCESS_UP = _router(
    _GAUGE, "tandem_router_process_up",
    "Of a router of several processes, by `process`: whether it answers. The other metrics add up those that do.",
    "process",
)  # fmt: skip
BATCH_RUNNING = _router(
    _GAUGE, "tandem_batch_running_requests", "Requests of batches that run now in this router, of those in flight.",
)  # fmt: skip
WAITING = _router(
    _GAUGE, "tandem_router_waiting_requests",
    "Requests that no worker has now: between two attempts, or waiting for a worker.",
)  # fmt: skip
ADMISSION_WAITING = _router(_GAUGE, "tandem_admission_waiting_requests", "Requests that wait in this router.")
ADMISSION_WAIT = _router(
    _HISTOGRAM, "tandem_admission_wait_seconds",
    "How long requests waited in a router until workers had room; those that went at once are left out.",
)  # fmt: skip
ADMISSION_REFUSED = _router(
    _COUNTER, "tandem_admission_refused_total",
    'Requests told to come back later, by `reason`: "full" (too many wait), "late" (the first token would come too '
    'late for the SLO class or the deadline), "deadline" (that passed while it waited), "budget" (the tenant\'s is '
    "spent).", "reason",
)  # fmt: skip
PLANS = _router(_COUNTER, "tandem_plans_total", "Plans by `reason`.", "reason")
REATTEMPTS = _router(
    _COUNTER, "tandem_reattempts_total",
    'Attempts beyond the first by `cause`, why the one before ended: "lost", "transfer", "refused", "broken", '
    '"stalled", "moved".', "cause",
)  # fmt: skip
GIVEN_UP = _router(
    _COUNTER, "tandem_reattempts_denied_total",
    'Failures that reached the client by `reason`: "attempts", "budget", "no_worker".', "reason",
)  # fmt: skip
UNREAD_CALLS = _router(_COUNTER, "tandem_unread_tool_calls_total", "Unreadable tool calls by `format`.", "format")
RETRY_BUDGET = _router(
    _GAUGE, "tandem_retry_budget_tokens",
    "Re-attempts that may be made now; of several processes, by the one that may make the fewest.",
)  # fmt: skip
DROPPED_CHUNKS = _router(
    _COUNTER, "tandem_router_dropped_chunks_total",
    'Token chunks that a fence kept from a client, by `reason`: "attempt", "choice", "duplicate", "unknown", '
    '"unwanted".', "reason",
)  # fmt: skip
WORKER_UP = _router(
    _GAUGE, "tandem_worker_up", "Whether the router, each of its processes, is connected to the worker.", "worker"
)
WORKER_REGISTERED = _router(
    _GAUGE, "tandem_worker_registered", "Whether the worker holds a lease, as the registry says.", "worker"
)
BREAKER = _router(
    _GAUGE, "tandem_worker_breaker_state",
    "The router's breaker of the worker, the highest of its processes: 0 closed, 1 half-open, 2 open.", "worker",
)  # fmt: skip

# ---- the prefix index ----
INDEX_BLOCKS = _index(_GAUGE, "tandem_index_blocks", "Blocks in the router's replica of the index.")
INDEX_BYTES = _index(_GAUGE, "tandem_index_memory_bytes", "Memory of the replica.")
INDEX_EVICTED = _index(_COUNTER, "tandem_index_evicted_blocks_total", "Blocks forgotten for want of memory.")
INDEX_ENTRIES = _index(
    _COUNTER, "tandem_index_entries_total",
    "Entries of workers' streams that the replica applied; each changes up to 512 blocks.",
)  # fmt: skip
INDEX_TROUBLE = _index(
    _COUNTER, "tandem_index_trouble_total",
    'By `kind`: "gaps" and "mismatches" found, what was "unreadable", "rereads" of a worker\'s whole set because of '
    'them, "outages" of Redis.', "kind",
)  # fmt: skip
INDEX_PUBLISHING = Metric(
    MetricSource.INDEX, _COUNTER, "tandem_index_publishing_total",
    'By `kind`: "entries" written, whole sets "republished" (the first counts too), "overflows" of the queue, '
    '"refused" (another incarnation holds the lease, or none, or it was over), "gaps" (what Redis had lost), "outages" '
    "of Redis.", "worker", "role", "kind",
)  # fmt: skip

# ---- the cluster ----
REDIS_MEMORY = _cluster(_GAUGE, "tandem_redis_memory_bytes", "Memory of Redis that is `used`, and its `max`.", "kind")
CLUSTER_EVENTS = _cluster(
    _COUNTER, "tandem_cluster_events_total",
    'What happened to the cluster since the router began to look, by `kind` as `clusterctl events` has it: "draining", '
    '"flipped", "exited" and so on; decisions of the planner are "plan_advised", "plan_acted" and "plan_denied".',
    "kind",
)  # fmt: skip
DESIRED_WORKERS = _cluster(
    _GAUGE, "tandem_desired_workers", "Workers of each `role` that the desired state names.", "role"
)
PLANNED_WORKERS = _cluster(
    _GAUGE, "tandem_planned_workers", "Workers of each `role` as the planner would have them; none while it is off.",
    "role",
)  # fmt: skip
COST = _cluster(
    _GAUGE, "tandem_cost_per_million_tokens",
    'What a million tokens cost over the last minute, by `phase` ("prefill": computed prompt tokens, "decode"), in the '
    "unit of the configured prices. Idle workers cost as much.", "phase",
)  # fmt: skip

# ---- workers ----
WORKER_STATE = _worker(
    _GAUGE, "tandem_worker_state",
    '1 for the `state` that it is in: "ready", "draining", "drained", "flipping", "stalled"; 0.', "state",
)  # fmt: skip
WORKER_IN_FLIGHT = _worker(_GAUGE, "tandem_worker_in_flight_requests", "Requests at the worker.")
WORKER_QUEUED = _worker(_GAUGE, "tandem_worker_queued_requests", "Requests that wait there to be computed.")
WORKER_RUNNING = _worker(_GAUGE, "tandem_worker_running_requests", "Requests in the batch.")
WORKER_QUEUED_TOKENS = _worker(_GAUGE, "tandem_worker_queued_tokens", "Prompt tokens that still have to be computed.")
KV_BLOCKS = _worker(
    _GAUGE, "tandem_kv_blocks",
    'Blocks by `group` and `state`: "free", "cached", and those that are held: by a "request", for a push '
    '("pushing"), for a transfer to come ("reserved").', "group", "state",
)  # fmt: skip
REQUESTS_RECEIVED = _worker(_COUNTER, "tandem_requests_received_total", "Requests that routers sent or announced.")
REQUESTS_ADMITTED = _worker(_COUNTER, "tandem_requests_admitted_total", "Requests that came with their KV and went on.")
REQUESTS_FINISHED = _worker(_COUNTER, "tandem_requests_finished_total", "Requests that ended here with their answer.")
REQUESTS_FAILED = _worker(_COUNTER, "tandem_requests_failed_total", "Requests that ended here with an error.")
REQUESTS_CANCELLED = _worker(_COUNTER, "tandem_requests_cancelled_total", "Requests that nobody wanted any more.")
SUBMISSIONS_DROPPED = _worker(
    _COUNTER, "tandem_submissions_dropped_total", "Requests that came late, twice, or for another incarnation."
)
MESSAGES_TOO_LARGE = _worker(_COUNTER, "tandem_messages_too_large_total", "Messages that were too large to be sent.")
STEPS = _worker(_COUNTER, "tandem_engine_steps_total", "Steps of the engine.")
STEP_STALLS = _worker(
    _COUNTER, "tandem_step_stalls_total",
    "Steps that took longer than `[worker] step_slow_s`: the worker is out of rotation until such a step ends.",
)  # fmt: skip
STEP_SECONDS = _worker(_COUNTER, "tandem_step_seconds_total", "Time in steps: its rate is how busy the worker is.")
PREFILL_STEP_SECONDS = _worker(
    _COUNTER, "tandem_prefill_step_seconds_total", "Time in steps that computed prompt tokens, alone or beside others."
)
PREFILL_TOKENS = _worker(_COUNTER, "tandem_prefill_tokens_total", "Prompt tokens computed.")
DECODE_TOKENS = _worker(_COUNTER, "tandem_decode_tokens_total", "Output tokens computed, first ones not counted.")
MODEL_FLOPS = _worker(
    _COUNTER, "tandem_model_flops_total",
    "Floating-point operations of the model, by arithmetic of its shape, not measured; see MFU and MBU. Nothing of a "
    "simulated engine.",
)  # fmt: skip
MODEL_READ_BYTES = _worker(
    _COUNTER, "tandem_model_read_bytes_total",
    "Bytes of weights and KV that its steps had to read at least, by the same arithmetic.",
)  # fmt: skip
PEAK_FLOPS = _worker(
    _GAUGE, "tandem_worker_peak_flops_per_second",
    "What its accelerators promise, all ranks together, where `[worker] peak_flops_per_s` says it.",
)  # fmt: skip
PEAK_BYTES = _worker(
    _GAUGE, "tandem_worker_peak_bytes_per_second",
    "The same of their memory, where `[worker] peak_bytes_per_s` says it.",
)  # fmt: skip
PREEMPTIONS = _worker(_COUNTER, "tandem_preemptions_total", "Requests that gave their blocks to an older one.")
PREEMPTED_FOR_TICKETS = _worker(
    _COUNTER, "tandem_preempted_for_tickets_total", "Of these, to a request whose KV was to come from elsewhere."
)
PREEMPTED_SWAPPED = _worker(_COUNTER, "tandem_preempted_swapped_total", "Of these, who kept their KV in host memory.")
GRAMMARS_COMPILED = _worker(_COUNTER, "tandem_grammars_compiled_total", "Output grammars compiled.")
GRAMMAR_COMPILE_SECONDS = _worker(
    _COUNTER, "tandem_grammar_compile_seconds_total", "Time of compiling them, beside the steps."
)
GRAMMARS_REUSED = _worker(
    _COUNTER,
    "tandem_grammars_reused_total",
    "Output grammars that were asked for and compiled, or being compiled, already.",
)
GRAMMAR_MASKS = _worker(_COUNTER, "tandem_grammar_masks_total", "Masks of output grammars: one a token and choice.")
GRAMMAR_MASK_SECONDS = _worker(
    _COUNTER, "tandem_grammar_mask_seconds_total", "CPU time of computing them, while the model computes the logits."
)
GRAMMAR_DRAFTS = _worker(
    _COUNTER, "tandem_grammar_drafts_total", "Tokens computed beside the one before them, as grammars left one text."
)
GRAMMAR_ACCEPTED_DRAFTS = _worker(_COUNTER, "tandem_grammar_accepted_drafts_total", "Of these, tokens of answers.")
SPEC_DRAFTS = _worker(
    _COUNTER, "tandem_spec_decode_num_drafts_total", "Drafts from copied text: one a choice and step."
)
SPEC_DRAFT_TOKENS = _worker(_COUNTER, "tandem_spec_decode_num_draft_tokens_total", "Tokens of these drafts.")
SPEC_ACCEPTED_TOKENS = _worker(_COUNTER, "tandem_spec_decode_num_accepted_tokens_total", "Of them, tokens of answers.")
WORKER_RECOMPUTED = _worker(
    _COUNTER, "tandem_worker_recomputed_tokens_total",
    'Tokens computed again by `cause`: "preempted", what a request had before and did not find cached when it came '
    "back. See tandem_recomputed_tokens_total for other causes.", "cause",
)  # fmt: skip
HASH_MISMATCHES = _worker(
    _COUNTER, "tandem_prefix_hash_mismatch_total",
    "Requests whose last block hash the router and the worker computed differently.",
)  # fmt: skip
REGISTRY_REFUSED = _worker(
    _COUNTER, "tandem_registry_refused_total",
    'What a worker wrote to the registry in vain, by `reason`: "late" (its lease was over when Redis was reached) or '
    '"fenced" (another incarnation holds it, or none).', "reason",
)  # fmt: skip
REJOINS = _worker(
    _COUNTER, "tandem_worker_rejoins_total",
    'Times that a worker registered again without being told to, by `incarnation`: "same" (Redis had lost it), "new" '
    "(its lease had lapsed).", "incarnation",
)  # fmt: skip
BLOCKS_REPAIRED = _worker(_COUNTER, "tandem_blocks_repaired_total", "Blocks that a repair after an audit gave back.")

# ---- KV between workers ----
KV_TRANSFER_BYTES = _moving(
    _COUNTER, "tandem_kv_transfer_bytes_total", 'Payload bytes by `direction`: "sent" or "received".', "direction"
)
KV_LINK_TRANSFERS = _moving(
    _COUNTER, "tandem_kv_link_transfers_total",
    'Transfers to each `peer` that ended, by `outcome`: "verified" there, or "failed" after the ticket was here, which '
    "the router tries again.", "peer", "outcome",
)  # fmt: skip
KV_LINK_BYTES = _moving(_COUNTER, "tandem_kv_link_bytes_total", "Payload bytes of those that were verified.", "peer")
KV_LINK_SECONDS = _moving(
    _COUNTER, "tandem_kv_link_seconds_total",
    "How long these took, from the ticket to the word that all is verified. The prompt is computed meanwhile: see "
    "tandem_kv_link_bytes_per_second for the link alone.", "peer",
)  # fmt: skip
KV_LINK_SPEED = _moving(
    _GAUGE, "tandem_kv_link_bytes_per_second",
    "What transfers to each `peer` achieved lately while the link was busy, all ranks together; 0 = too little went "
    "over it.", "peer", "transport",
)  # fmt: skip
KV_LINK_STALLS = _moving(
    _COUNTER, "tandem_kv_link_stalls_total",
    "How often the sender had to wait for the receiver on links that are open.", "peer", "transport",
)  # fmt: skip
KV_CHECKSUM_FAILURES = _moving(
    _COUNTER, "tandem_kv_checksum_failures_total",
    "Frames from each `peer` whose checksum did not hold. Nothing of them is used; the transfer fails.", "peer",
)  # fmt: skip
KV_TRANSFER_BLOCKS = _moving(
    _COUNTER, "tandem_kv_transfer_blocks_total", "Blocks by `direction`, of transfers that were verified.", "direction"
)
KV_TRANSFER_SKIPPED_BLOCKS = _moving(
    _COUNTER, "tandem_kv_transfer_skipped_blocks_total", "Blocks that were here, so that nobody had to send them."
)
KV_RECEIVING = _moving(_GAUGE, "tandem_kv_receiving_transfers", "Transfers that are open in the worker's receiver now.")
LEASES = _moving(
    _GAUGE, "tandem_transfer_leases",
    "Transfers that the worker works on with others, and keeps blocks for while those name them.",
)  # fmt: skip
KV_ARRIVED_BYTES = _moving(
    _COUNTER, "tandem_transfer_bytes_total", "Bytes that its receiver took, also of transfers that failed later."
)
KV_ARRIVED_FRAMES = _moving(_COUNTER, "tandem_transfer_frames_total", "Frames that its receiver took.")
KV_ARRIVED_BLOCKS = _moving(_COUNTER, "tandem_transfer_blocks_total", "Blocks that its receiver completed.")
KV_PROBES = _moving(_COUNTER, "tandem_transfer_probes_total", "Frames that measured a link.")
KV_FRAMES_DROPPED = _moving(
    _COUNTER, "tandem_kv_frames_dropped_total", "Frames that a fence or a checksum refused, by `reason`.", "reason"
)
HANDOVERS = _moving(_COUNTER, "tandem_handovers_total", "Requests that a prefill worker handed over.")
TICKETS_QUEUED = _moving(
    _COUNTER, "tandem_tickets_queued_total", "Tickets that had to wait for blocks; both ends count them."
)
TICKETS_REVOKED = _moving(
    _COUNTER, "tandem_tickets_revoked_total", "Tickets taken back before anything came for them; both ends count them."
)
TICKETS_REFUSED = _moving(_COUNTER, "tandem_tickets_refused_total", "Tickets that a decode worker refused.")
TICKETS_DROPPED = _moving(_COUNTER, "tandem_tickets_dropped_total", "Tickets that nobody waited for any more.")
TICKET_REQUESTS_DROPPED = _moving(
    _COUNTER, "tandem_ticket_requests_dropped_total", "Requests for a ticket that came late, twice or unannounced."
)
COMPLETES_DROPPED = _moving(
    _COUNTER, "tandem_completes_dropped_total", "Sequences that came for a transfer which was over."
)
REVOCATIONS_DROPPED = _moving(
    _COUNTER, "tandem_revocations_dropped_total", "Revocations of tickets that were of no use any more."
)
TRANSFERS_FORGOTTEN = _moving(
    _COUNTER,
    "tandem_transfers_forgotten_total",
    "Leases of transfers that ran out: the other end had stopped naming them.",
)
FETCHES = _moving(
    _COUNTER, "tandem_kv_fetches_total",
    "Prefixes that came from a worker that held them, and all their blocks verified.",
)  # fmt: skip
FETCHED_TOKENS = _moving(_COUNTER, "tandem_kv_fetched_tokens_total", "Tokens of these that were not here.")
FETCHED_BYTES = _moving(_COUNTER, "tandem_kv_fetched_bytes_total", "Bytes of these, which also count as received.")
FETCHES_FAILED = _moving(
    _COUNTER, "tandem_kv_fetches_failed_total",
    'Tries that gave nothing by `reason`: "refused", "holder", "peer_gone", "transfer", "forgotten", "late", '
    '"no_room".', "reason",
)  # fmt: skip
FETCH_OFFERS_DROPPED = _moving(
    _COUNTER, "tandem_fetch_offers_dropped_total", "Offers of a prefix that came late or twice."
)
SUPPLIES = _moving(_COUNTER, "tandem_kv_supplies_total", "Fetches of other workers that this one fed.")
SUPPLIES_REFUSED = _moving(
    _COUNTER, "tandem_fetches_refused_total", "Fetches of other workers that this one could not feed."
)
FETCH_REQUESTS_DROPPED = _moving(
    _COUNTER, "tandem_fetch_requests_dropped_total", "Requests of other workers for a prefix that came twice."
)

# ---- under the names of vLLM ----
VLLM_RUNNING = _vllm(_GAUGE, "vllm:num_requests_running", "As tandem_worker_running_requests.", *_BY_WORKER)
VLLM_WAITING = _vllm(
    _GAUGE, "vllm:num_requests_waiting",
    "As tandem_worker_queued_requests. Requests that no worker has yet wait in routers: add "
    "tandem_admission_waiting_requests.", *_BY_WORKER,
)  # fmt: skip
VLLM_KV_USAGE = _vllm(
    _GAUGE, "vllm:kv_cache_usage_perc",
    "The share of the fullest KV group's blocks that are held, 0 to 1; cached blocks that nobody holds are free.",
    *_BY_WORKER,
)  # fmt: skip
VLLM_KV_USAGE_BEFORE = _vllm(
    _GAUGE, "vllm:gpu_cache_usage_perc", "The same; what older releases of vLLM called it.", *_BY_WORKER
)
VLLM_CACHE_CONFIG = _vllm(
    _GAUGE, "vllm:cache_config_info",
    "1; its labels say the tokens of a block, and the blocks of the smallest KV group.", *_BY_WORKER, "block_size",
    "num_gpu_blocks",
)  # fmt: skip
VLLM_PREEMPTIONS = _vllm(_COUNTER, "vllm:num_preemptions_total", "As tandem_preemptions_total.", *_BY_WORKER)
VLLM_TTFT = _vllm(
    _HISTOGRAM, "vllm:time_to_first_token_seconds", "As tandem_time_to_first_token_seconds.", "model_name"
)
VLLM_ITL = _vllm(_HISTOGRAM, "vllm:inter_token_latency_seconds", "As tandem_inter_token_latency_seconds.", "model_name")
VLLM_E2E = _vllm(_HISTOGRAM, "vllm:e2e_request_latency_seconds", "As tandem_request_duration_seconds.", "model_name")
VLLM_QUEUE = _vllm(_HISTOGRAM, "vllm:request_queue_time_seconds", "As tandem_request_queue_seconds.", "model_name")
VLLM_PREFILL = _vllm(
    _HISTOGRAM, "vllm:request_prefill_time_seconds", "As tandem_request_prefill_seconds.", "model_name"
)
VLLM_DECODE = _vllm(_HISTOGRAM, "vllm:request_decode_time_seconds", "As tandem_request_decode_seconds.", "model_name")
VLLM_PROMPT_TOKENS = _vllm(_COUNTER, "vllm:prompt_tokens_total", "As tandem_prompt_tokens_total.", "model_name")
VLLM_GENERATION_TOKENS = _vllm(
    _COUNTER, "vllm:generation_tokens_total", "As tandem_generation_tokens_total.", "model_name"
)
VLLM_CACHE_QUERIES = _vllm(_COUNTER, "vllm:prefix_cache_queries_total", "As tandem_prompt_tokens_total.", "model_name")
VLLM_CACHE_HITS = _vllm(_COUNTER, "vllm:prefix_cache_hits_total", "As tandem_cached_prompt_tokens_total.", "model_name")

CATALOGUE: Mapping[str, Metric] = MappingProxyType(
    {str(metric): metric for metric in tuple(globals().values()) if isinstance(metric, Metric)}
)
"""Every metric by its name."""

_SHORT = {
    "kv_sent_bytes": (KV_TRANSFER_BYTES, {"direction": "sent"}),
    "kv_received_bytes": (KV_TRANSFER_BYTES, {"direction": "received"}),
    "kv_received_blocks": (KV_TRANSFER_BLOCKS, {"direction": "received"}),
    "prefix_hash_mismatches": (HASH_MISMATCHES, {}),
    "steps": (STEPS, {}),
    "kv_skipped_blocks": (KV_TRANSFER_SKIPPED_BLOCKS, {}),
    "transfer_open": (KV_RECEIVING, {}),
}
"""Short names of workers' counters, besides those that only lack the prefix."""
_DROPPED = "transfer_dropped_"
"""Prefix under which workers count dropped frames; the reason follows."""


def counter_key(name: str, **labels: str) -> str:
    """The key under which a counter travels in a load report."""
    if not labels:
        return str(name)
    return name + "{" + ",".join(f"{key}={labels[key]}" for key in sorted(labels)) + "}"


def reported(key: str) -> tuple[Metric, dict[str, str]] | None:
    """The metric that a key of a load report stands for, with its labels; None if there is none such, or if it has
    other labels: a worker of another release may count something that this one does not know."""
    if key in _SHORT:
        return _SHORT[key]
    if key.startswith(_DROPPED):
        return KV_FRAMES_DROPPED, {"reason": key.removeprefix(_DROPPED)}
    name, own = parse_counter_key(key)
    metric = CATALOGUE.get(name) or CATALOGUE.get(f"{name}_total")
    if metric is None or {"worker", "role", *own} != set(metric.labels):
        return None
    return metric, own


def parse_counter_key(key: str) -> tuple[str, dict[str, str]]:
    """Name (always with the `tandem_` prefix) and labels of a key made by `counter_key`."""
    name, _, rest = key.partition("{")
    if not name.startswith(PREFIX):
        name = PREFIX + name
    pairs = (part.partition("=") for part in rest.rstrip("}").split(",") if part)
    return name, {label.strip(): value.strip().strip('"') for label, _, value in pairs}
