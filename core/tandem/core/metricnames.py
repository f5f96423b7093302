"""Names of every metric, once. Workers report counters under these names in their load reports; routers export them.

A counter that has labels of its own travels under a key such as `tandem_kv_transfer_bytes_total{direction=sent}`
(see `counter_key`); the router adds `worker` and `role`.
"""

from __future__ import annotations

PREFIX = "tandem_"

# ---- measured by routers ----
REQUESTS = "tandem_requests_total"
"""Requests by `api` and `outcome`: "ok", "cancelled" or the code of an error."""
TTFT = "tandem_time_to_first_token_seconds"
PREDICTED_TTFT = "tandem_predicted_time_to_first_token_seconds"
"""As the plan had it, from dispatch on; first attempts only."""
TTFT_ERROR = "tandem_time_to_first_token_error_seconds"
"""How far that was from what came, without the sign."""
SECOND_TOKEN = "tandem_time_to_second_token_seconds"  # noqa: S105 - a metric, no password
"""From the first token of a request to its second one: what a hand-off delays."""
ITL = "tandem_inter_token_latency_seconds"
E2E = "tandem_request_duration_seconds"
QUEUE = "tandem_request_queue_seconds"
"""From dispatch until a worker began to compute the prompt."""
HANDOFF_OVERHEAD = "tandem_handoff_overhead_seconds"
PROMPT_TOKENS = "tandem_prompt_tokens_total"
GENERATED_TOKENS = "tandem_generation_tokens_total"
CACHED_TOKENS = "tandem_cached_prompt_tokens_total"
PREFIX_PREDICTED = "tandem_prefix_predicted_tokens_total"
"""Prompt tokens that the chosen worker was predicted to know, of every prompt whose worker said what it found."""
PREFIX_ACTUAL = "tandem_prefix_actual_tokens_total"
"""What it found."""
PREFIX_MISMATCHES = "tandem_prefix_mismatch_total"
"""Prompts where the two differ, by `basis` ("index": published blocks; "speculation": also blocks of prompts just sent)
and `found` ("less" or "more" than predicted). "less" by the index is a stale hit."""
INDEX_BLOCKS = "tandem_index_blocks"
INDEX_BYTES = "tandem_index_memory_bytes"
INDEX_EVICTED = "tandem_index_evicted_blocks_total"
INDEX_ENTRIES = "tandem_index_entries_total"
"""Entries of workers' streams that the replica applied; each changes up to 512 blocks."""
INDEX_TROUBLE = "tandem_index_trouble_total"
"""By `kind`: "gaps" and "mismatches" found, "rereads" of a worker's whole set because of them, "outages" of Redis."""
ROUTER_IN_FLIGHT = "tandem_router_in_flight_requests"
ROUTER_PROCESS_UP = "tandem_router_process_up"
"""Of a router of several processes, by `process`: whether it answers. The other metrics add up those that do."""
BATCH_RUNNING = "tandem_batch_running_requests"
"""Requests of batches that run now in this router, of those in flight."""
ADMISSION_WAITING = "tandem_admission_waiting_requests"
ADMISSION_WAIT = "tandem_admission_wait_seconds"
"""How long requests waited in a router until workers had room; those that went at once are left out."""
ADMISSION_REFUSED = "tandem_admission_refused_total"
"""Requests told to come back later, by `reason`: "full" (too many wait), "late" (the first token would come too late
for the SLO class or the deadline), "deadline" (that passed while it waited), "budget" (the tenant's is spent)."""
SLO_REQUESTS = "tandem_slo_requests_total"
"""Requests of an SLO class, by `slo` and `outcome`: "met" and "missed" its targets, "failed", "cancelled"."""
DROPPED_CHUNKS = "tandem_router_dropped_chunks_total"
"""Token chunks that a fence kept from a client, by `reason`: "attempt", "choice", "duplicate", "unknown"."""
PLANS = "tandem_plans_total"
"""Plans by `reason`."""
REATTEMPTS = "tandem_reattempts_total"
"""Attempts beyond the first by `cause` of the failure before: "lost", "transfer", "refused", "broken", "stalled"."""
GIVEN_UP = "tandem_reattempts_denied_total"
"""Failures that reached the client by `reason`: "attempts", "budget", "no_worker"."""
RETRY_BUDGET = "tandem_retry_budget_tokens"
WAITING = "tandem_router_waiting_requests"
"""Requests that no worker has now: between two attempts, or waiting for a worker."""
BREAKER = "tandem_worker_breaker_state"
"""0 closed, 1 half-open, 2 open."""

# ---- reported by workers ----
INDEX_PUBLISHING = "tandem_index_publishing_total"
"""By `kind`: "entries" written, whole sets "republished" (the first counts too), "overflows" of the queue, "refused"
(another incarnation holds the lease, or none, or it was over), "gaps" (what Redis had lost), "outages" of Redis."""
REGISTRY_REFUSED = "tandem_registry_refused_total"
"""What a worker wrote to the registry in vain, by `reason`: "late" (its lease was over when Redis was reached) or
"fenced" (another incarnation holds it, or none)."""
REJOINS = "tandem_worker_rejoins_total"
"""Times that a worker registered again without being told to, by `incarnation`: "same" (Redis had lost it), "new" (its
lease had lapsed)."""
WORKER_UP = "tandem_worker_up"
WORKER_IN_FLIGHT = "tandem_worker_in_flight_requests"
WORKER_QUEUED = "tandem_worker_queued_requests"
WORKER_RUNNING = "tandem_worker_running_requests"
WORKER_QUEUED_TOKENS = "tandem_worker_queued_tokens"
KV_BLOCKS = "tandem_kv_blocks"
"""Blocks by `group` and `state`: "free", "cached", "request", "pushing", "reserved"."""
KV_TRANSFER_BYTES = "tandem_kv_transfer_bytes_total"
"""Payload bytes by `direction`: "sent" or "received"."""
KV_TRANSFER_BLOCKS = "tandem_kv_transfer_blocks_total"
KV_TRANSFER_SKIPPED_BLOCKS = "tandem_kv_transfer_skipped_blocks_total"
KV_RECEIVING = "tandem_kv_receiving_transfers"
"""Transfers that are open in the worker's receiver now."""
FETCHES = "tandem_kv_fetches_total"
"""Prefixes that came from a worker that held them, and all their blocks verified."""
FETCHED_TOKENS = "tandem_kv_fetched_tokens_total"
FETCHED_BYTES = "tandem_kv_fetched_bytes_total"
FETCHES_FAILED = "tandem_kv_fetches_failed_total"
"""Tries that gave nothing by `reason`: "refused", "holder", "peer_gone", "transfer", "forgotten", "late", "no_room"."""
SUPPLIES = "tandem_kv_supplies_total"
"""Fetches of other workers that this one fed."""
KV_FRAMES_DROPPED = "tandem_kv_frames_dropped_total"
"""Frames that a fence or a checksum refused, by `reason`."""
PREFILL_TOKENS = "tandem_prefill_tokens_total"
DECODE_TOKENS = "tandem_decode_tokens_total"
PREEMPTIONS = "tandem_preemptions_total"
STEPS = "tandem_engine_steps_total"
HASH_MISMATCHES = "tandem_prefix_hash_mismatch_total"
"""Requests whose last block hash the router and the worker computed differently."""


def counter_key(name: str, **labels: str) -> str:
    """The key under which a counter travels in a load report."""
    if not labels:
        return name
    return name + "{" + ",".join(f"{key}={labels[key]}" for key in sorted(labels)) + "}"


def parse_counter_key(key: str) -> tuple[str, dict[str, str]]:
    """Name (always with the `tandem_` prefix) and labels of a key made by `counter_key`."""
    name, _, rest = key.partition("{")
    if not name.startswith(PREFIX):
        name = PREFIX + name
    pairs = (part.partition("=") for part in rest.rstrip("}").split(",") if part)
    return name, {label.strip(): value.strip().strip('"') for label, _, value in pairs}
