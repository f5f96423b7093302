"""Chooses tokens from logits, batched over rows. A row's token depends on its own logits and settings alone.

Order, as in transformers: repetition, presence and frequency penalties, bias, forbidden tokens → temperature → top-k →
top-p → min-p.
The random number of a token is a pure function of (seed, choice, output index), so any worker can continue a request.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core.handoff import TokenLogprob
from tandem.engine.filters import choose_filtered, choose_unfiltered
from tandem.engine.masks import apply_masks
from tandem.engine.penalties import apply_bias, apply_penalties
from tandem.engine.sampled import Sampled, SampleRow

_CPU_PIECE = 65_536
"""Logits drawn from at once on a CPU: larger temporaries leave the cache and cost page faults (9 times as long)."""
_REPORT_PIECE = 1 << 24
"""Logits whose log-softmax is in memory at once."""
_RANDOM = struct.Struct("<qII")


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits from SHA-256 over (seed, choice, output index)."""
    digest = hashlib.sha256(b"tandem-sample" + _RANDOM.pack(seed, choice, index)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Tokens for `rows` from fp32 `logits` [n, vocab], which are not changed. Several rows may share a logits row.

    Rows with a token are only reported. Logprobs are the log-softmax of the raw logits. One device synchronisation if
    every row is plain greedy.
    """
    best_values, best_ids = logits.max(dim=-1)
    values, ids = best_values.tolist(), best_ids.tolist()
    results = [
        Sampled(ids[row.row] if row.token is None else row.token, is_valid=math.isfinite(values[row.row]))
        for row in rows
    ]
    is_busy = [row.token is not None or not row.sampling.is_plain for row in rows]
    busy = [i for i, result in enumerate(results) if is_busy[i] and result.is_valid]
    if not busy:
        return results
    chosen = [i for i in busy if rows[i].token is None]
    _choose(logits, [rows[i] for i in chosen], [results[i] for i in chosen])
    reported = [i for i in busy if _wanted_logprobs(rows[i]) is not None]
    size = max(1, _REPORT_PIECE // logits.shape[1])
    for start in range(0, len(reported), size):
        piece = reported[start : start + size]
        _report_logprobs(logits, [rows[i] for i in piece], [results[i] for i in piece])
    return results


def _wanted_logprobs(row: SampleRow) -> int | None:
    """How many alternatives to report with a token; None = nothing is reported."""
    params = row.sampling.params
    return params.logprobs if row.token is None else params.prompt_logprobs


def _choose(logits: Tensor, rows: list[SampleRow], results: list[Sampled]) -> None:
    """Set the tokens of rows that are not plain greedy."""
    changed = [i for i, row in enumerate(rows) if row.sampling.changes_scores]
    random = [i for i, r in enumerate(rows) if not r.sampling.params.is_greedy]
    if not changed and not random:
        return
    places = [row.row for row in rows]
    scores = logits
    if changed or places != list(range(len(logits))):
        scores = logits[torch.tensor(places, device=logits.device)]  # a copy
    if changed:
        states = [row.sampling for row in rows]
        apply_penalties(scores, states)
        apply_bias(scores, states)
        apply_masks(scores, rows)
        if len(random) < len(rows):
            for result, token in zip(results, scores.argmax(dim=-1).tolist(), strict=True):
                result.token = token
    for is_filtered, choose in ((False, _unfiltered), (True, _filtered)):
        part = [i for i in random if rows[i].sampling.has_filter is is_filtered]
        size = max(1, _CPU_PIECE // scores.shape[1]) if scores.device.type == "cpu" else len(rows)
        for start in range(0, len(part), size):
            piece = part[start : start + size]
            some = scores if len(piece) == len(rows) else scores[torch.tensor(piece, device=scores.device)]
            for i, token in zip(piece, choose(some, [rows[i] for i in piece]), strict=True):
                results[i].token = token


def _unfiltered(scores: Tensor, rows: list[SampleRow]) -> list[int]:
    return choose_unfiltered(_heated(scores, rows), _uniforms(scores, rows)).tolist()


def _filtered(scores: Tensor, rows: list[SampleRow]) -> list[int]:
    params = [row.sampling.params for row in rows]
    device = scores.device
    top_k = torch.tensor([min(p.top_k, scores.shape[1]) for p in params], dtype=torch.int64, device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
    tokens = choose_filtered(_heated(scores, rows), top_k, top_p, min_p, _uniforms(scores, rows))
    return tokens.tolist()


def _heated(scores: Tensor, rows: list[SampleRow]) -> Tensor:
    """Scores over temperature, shifted so that the best is 0: a tiny temperature cannot overflow."""
    heat = torch.tensor([row.sampling.params.temperature for row in rows], dtype=torch.float32, device=scores.device)
    return (scores - scores.amax(dim=-1, keepdim=True)).div_(heat.clamp_(min=1e-30)[:, None])


def _uniforms(scores: Tensor, rows: list[SampleRow]) -> Tensor:
    numbers = [uniform(row.sampling.params.seed, row.sampling.choice, row.index) for row in rows]
    return torch.tensor(numbers, dtype=torch.float64, device=scores.device)


def _report_logprobs(logits: Tensor, rows: list[SampleRow], results: list[Sampled]) -> None:
    raw = logits[torch.tensor([row.row for row in rows], device=logits.device)].log_softmax(dim=-1)
    tokens = torch.tensor([result.token for result in results], device=logits.device)
    own = raw.gather(1, tokens[:, None])
    wanted = [min(_wanted_logprobs(row) or 0, raw.shape[1]) for row in rows]
    ranks = ((raw > own).sum(dim=-1) + 1).tolist()
    tops: list[tuple[list[float], list[int]]] = [([], [])] * len(rows)
    if max(wanted):
        values, ids = raw.topk(max(wanted), dim=-1)
        tops = list(zip(values.tolist(), ids.tolist(), strict=True))
    for result, logprob, rank, count, (values_of, ids_of) in zip(
        results, own[:, 0].tolist(), ranks, wanted, tops, strict=True
    ):
        top = tuple(zip(ids_of[:count], values_of[:count], strict=True))
        result.logprob = TokenLogprob(token=result.token, logprob=logprob, top=top, rank=rank)
