"""Summary of a cluster's status: health, pools, key figures, warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.clusterctl.inspect.histograms import Scrape
from tandem.controlplane.prog_name import called
from tandem.core import metric_names as names

Record = Mapping[str, Any]
_FULL = 0.95
"""Of the KV blocks: beyond that, further requests wait or preempt."""
_LONG_WAIT_S = 1.0


def overview(status: Record, scrape: Scrape, unplaced: Sequence[str] = ()) -> dict[str, Any]:
    """Return {"health", "pools", "figures", "warnings"}, derived from the admin port's response.

    `unplaced`: a line for each worker that waits for a machine with room.
    `health` is "ok", "degraded" (it serves, and something is wrong) or "down". Figures are of all requests in `scrape`.
    """
    warnings = list(_warnings(status))
    fix = f"join a machine that has room, or scale down; `{called()} events` goes on"
    warnings += [_warning(line, fix) for line in unplaced]
    is_ready = bool(status.get("is_ready"))
    return {
        "health": "down" if not is_ready else "degraded" if warnings else "ok",
        "pools": _pools(status.get("workers") or []),
        "figures": _figures(scrape),
        "warnings": warnings,
    }


def kv_share(workers: Sequence[Record]) -> float | None:
    """Return the share of the workers' KV blocks that requests hold; None if no worker reported it."""
    groups = [group for worker in workers for group in worker.get("blocks") or []]
    total = sum(int(group["total"]) for group in groups)
    held = sum(int(group["total"]) - int(group["free"]) - int(group["cached"]) for group in groups)
    return held / total if total else None


def revisions_apart(status: Record) -> str:
    """Return the revisions of workers that are not paired because a rollout is half way, such as "initial and r2"; "" =
    all refused pairs have other reasons."""
    of = {str(worker.get("worker")): str(worker.get("revision") or "") for worker in status.get("workers") or []}
    pairs = [
        (of.get(str(one.get("prefill"))), of.get(str(one.get("decode")))) for one in status.get("refused_pairs") or []
    ]
    if not pairs or not all(one and other and one != other for one, other in pairs):
        return ""
    return " and ".join(sorted({str(one) for pair in pairs for one in pair}))


def _pools(workers: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for the workers of each model and role."""
    by_pool: dict[tuple[str, str], list[Record]] = {}
    for worker in workers:
        by_pool.setdefault((str(worker.get("model") or ""), str(worker.get("role") or "")), []).append(worker)
    return [pool_of(model, role, members) for (model, role), members in sorted(by_pool.items())]


def pool_of(model: str, role: str, members: Sequence[Record]) -> dict[str, Any]:
    """Return a row for these workers of one model and role."""
    return {
        "model": model,
        "role": role,
        "workers": len(members),
        "ready": sum(_is_ready(worker) for worker in members),
        **{
            key: sum(int(worker.get(key) or 0) for worker in members)
            for key in ("running_requests", "queued_requests", "queued_tokens")
        },
        "kv_share": _rounded(kv_share(members)),
    }


def _is_ready(worker: Record) -> bool:
    return bool(worker.get("is_connected") and worker.get("is_registered") and not worker.get("trouble"))


def _figures(scrape: Scrape) -> dict[str, Any]:
    prompts = scrape.total(names.PROMPT_TOKENS)
    return {
        "requests": int(scrape.total(names.REQUESTS)),
        "prompt_tokens": int(prompts),
        "output_tokens": int(scrape.total(names.GENERATED_TOKENS)),
        "hit_share": _rounded(scrape.total(names.CACHED_TOKENS) / prompts if prompts else None),
        "ttft_p50_s": _rounded(scrape.quantile(names.TTFT, 0.5)),
        "ttft_p99_s": _rounded(scrape.quantile(names.TTFT, 0.99)),
        "itl_p50_s": _rounded(scrape.quantile(names.ITL, 0.5)),
        "itl_p99_s": _rounded(scrape.quantile(names.ITL, 0.99)),
        "reattempts": int(scrape.total(names.REATTEMPTS)),
    }


def _warnings(status: Record) -> Iterator[dict[str, str]]:
    for missing in status.get("missing") or []:
        yield _warning(f"missing: {missing}", f"`{called()} logs up` shows the reason")
    if status.get("registry_trouble"):
        yield _warning(f"registry: {status['registry_trouble']}", f"`{called()} doctor` looks at Redis")
    for worker in status.get("workers") or []:
        name = worker.get("worker")
        if worker.get("trouble"):
            yield _warning(f"{name}: {worker['trouble']}", f"`{called()} logs {name} --level WARNING`")
        elif not worker.get("is_registered", True):
            yield _warning(f"{name} has lost its lease", f"it recovers by itself, or see `{called()} logs {name}`")
        if worker.get("breaker") == "open":
            what = f"{name} gets no requests for a while, as they failed there"
            yield _warning(what, f"`{called()} logs {name} --level WARNING`")
        share = kv_share([worker])
        if share is not None and share > _FULL:
            yield _warning(f"{name} has {share:.0%} of its KV in use", "give it more --kv-memory, or more workers")
    if between := revisions_apart(status):
        yield _warning(f"workers of {between} serve side by side", f"`{called()} rollout status` says how far that is")
    for pair in status.get("refused_pairs") or [] if not between else []:
        what = f"never paired: {pair.get('prefill')} and {pair.get('decode')}: {pair.get('why')}"
        yield _warning(what, "give both pools the settings that the reason names")
    for lane in (status.get("admission") or {}).get("models") or []:
        wait_s = lane.get("predicted_wait_s")
        if wait_s is not None and wait_s > _LONG_WAIT_S:
            yield _warning(f"{lane['waiting']} requests wait, a new one about {wait_s:.1f} s", "add workers")


def _warning(what: str, fix: str) -> dict[str, str]:
    return {"what": what, "fix": fix}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
