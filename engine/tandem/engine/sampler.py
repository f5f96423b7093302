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
from tandem.engine.logits_processors import apply_bias, apply_masks, apply_penalties
from tandem.engine.request import TokenOutput
from tandem.engine.runner_protocol import SampleRow
from tandem.engine.step_tensors import Download, upload
from tandem.engine.token_drawing import choose_filtered, choose_unfiltered, likeliest

_CPU_PIECE = 65_536
"""Logits drawn from at once on a CPU: larger temporaries leave the cache and cost page faults (9 times as long)."""
_REPORT_PIECE = 1 << 24
"""Logits for which the log-softmax is in memory at once."""
_RANDOM = struct.Struct("<qII")


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits from SHA-256 over (seed, choice, output index)."""
    digest = hashlib.sha256(b"tandem-sample" + _RANDOM.pack(seed, choice, index)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


class Choosing:
    """Tokens for the rows of one step, being chosen on the device.

    `tokens`: int64 [rows], on the device of the logits; of a row without a finite maximum any token of the vocabulary.
    """

    def __init__(self, tokens: Tensor, values: Tensor, rows: Sequence[SampleRow], reports: list[_Report]) -> None:
        self.tokens = tokens
        self._rows, self._reports = rows, reports
        self._download = Download(tokens, values)

    def results(self) -> list[TokenOutput]:
        """Return the chosen tokens, in the order of the rows. Waits for the device; once."""
        tokens, values = (tensor.tolist() for tensor in self._download.wait())
        results = [
            TokenOutput(token, is_valid=math.isfinite(values[row.row]))
            for token, row in zip(tokens, self._rows, strict=True)
        ]
        for report in self._reports:
            report.tell(results)
        return results


def sample(logits: Tensor, rows: Sequence[SampleRow], *, may_change: bool = False) -> list[TokenOutput]:
    """Tokens for `rows` from fp32 `logits` [n, vocab], which may be written over where the caller allows it
    (`may_change`). Several rows may share a logits row.

    Rows with a token are only reported. Logprobs are the log-softmax of the raw logits.
    """
    return choose(logits, rows, may_change=may_change).results()


def choose(logits: Tensor, rows: Sequence[SampleRow], *, may_change: bool = False) -> Choosing:
    """As `sample`, with asynchronous results: on a GPU nothing here waits for the device, unless a row has penalties,
    a bias or forbidden tokens. Operations queued behind may overwrite the logits."""
    values, best = likeliest(logits)
    device = logits.device
    is_in_order = len(rows) == len(logits) and all(place == row.row for place, row in enumerate(rows))
    tokens = best if is_in_order else best[upload([row.row for row in rows], torch.int64, device)]
    given = [place for place, row in enumerate(rows) if row.token is not None]
    if given:
        _put(tokens, given, upload([rows[i].token or 0 for i in given], torch.int64, device))
    chosen = [place for place, row in enumerate(rows) if row.token is None and not row.sampling.is_plain]
    wanted = [place for place, row in enumerate(rows) if _wanted_logprobs(row) is not None]
    _choose(logits, rows, chosen, tokens, may_change=may_change and not wanted)
    size = max(1, _REPORT_PIECE // logits.shape[1])
    pieces = [wanted[start : start + size] for start in range(0, len(wanted), size)]
    return Choosing(tokens, values, rows, [_Report(logits, rows, piece, tokens) for piece in pieces])


def _put(tokens: Tensor, places: list[int], values: Tensor) -> None:
    """tokens[places] = values."""
    if len(places) == len(tokens):
        tokens.copy_(values)
    else:
        tokens[upload(places, torch.int64, tokens.device)] = values


def _wanted_logprobs(row: SampleRow) -> int | None:
    """How many alternatives to report with a token; None = nothing is reported."""
    params = row.sampling.params
    return params.logprobs if row.token is None else params.prompt_logprobs


def _choose(logits: Tensor, rows: Sequence[SampleRow], chosen: list[int], tokens: Tensor, *, may_change: bool) -> None:
    """Set the tokens of the rows at `chosen`, which are not plain greedy."""
    some = [rows[i] for i in chosen]
    changed = any(row.sampling.changes_scores for row in some)
    random = [i for i, row in enumerate(some) if not row.sampling.params.is_greedy]
    if not changed and not random:
        return
    places = [row.row for row in some]
    scores = logits
    if (changed and not may_change) or places != list(range(len(logits))):
        scores = logits[upload(places, torch.int64, logits.device)]  # a copy
    if changed:
        states = [row.sampling for row in some]
        apply_penalties(scores, states)
        apply_bias(scores, states)
        apply_masks(scores, some)
        if len(random) < len(some):
            _put(tokens, chosen, likeliest(scores)[1])
    for is_filtered, draw in ((False, _unfiltered), (True, _filtered)):
        part = [i for i in random if some[i].sampling.has_filter is is_filtered]
        size = max(1, _CPU_PIECE // scores.shape[1]) if scores.device.type == "cpu" else len(some)
        for start in range(0, len(part), size):
            piece = part[start : start + size]
            own = scores if len(piece) == len(some) else scores[upload(piece, torch.int64, scores.device)]
            _put(tokens, [chosen[i] for i in piece], draw(own, [some[i] for i in piece]))


def _unfiltered(scores: Tensor, rows: list[SampleRow]) -> Tensor:
    return choose_unfiltered(_heated(scores, rows), _uniforms(scores, rows))


def _filtered(scores: Tensor, rows: list[SampleRow]) -> Tensor:
    params = [row.sampling.params for row in rows]
    device = scores.device
    top_k = upload([min(p.top_k, scores.shape[1]) for p in params], torch.int64, device)
    top_p = upload([p.top_p for p in params], torch.float64, device)
    min_p = upload([p.min_p for p in params], torch.float64, device)
    return choose_filtered(_heated(scores, rows), top_k, top_p, min_p, _uniforms(scores, rows))


def _heated(scores: Tensor, rows: list[SampleRow]) -> Tensor:
    """Scores over temperature, shifted so that the best is 0: a tiny temperature cannot overflow. NaN becomes 0, as do
    rows without a finite best: a token drawn from them is never returned to a client."""
    heat = upload([max(row.sampling.params.temperature, 1e-30) for row in rows], torch.float32, scores.device)
    shifted = (scores - scores.amax(dim=-1, keepdim=True)).div_(heat[:, None])
    return shifted.nan_to_num_(nan=0.0, neginf=-math.inf)


def _uniforms(scores: Tensor, rows: list[SampleRow]) -> Tensor:
    numbers = [uniform(row.sampling.params.seed, row.sampling.choice, row.index) for row in rows]
    return upload(numbers, torch.float64, scores.device)


class _Report:
    """The log-probabilities of the tokens at some places, on their way."""

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow], places: list[int], tokens: Tensor) -> None:
        device = logits.device
        self._places = places
        self._wanted = [min(_wanted_logprobs(rows[i]) or 0, logits.shape[1]) for i in places]
        raw = logits[upload([rows[i].row for i in places], torch.int64, device)].log_softmax(dim=-1)
        chosen = tokens if len(places) == len(rows) else tokens[upload(places, torch.int64, device)]
        own = raw.gather(1, chosen[:, None])
        ranks = (raw > own).sum(dim=-1) + 1
        values, ids = raw.topk(max(self._wanted), dim=-1)
        self._download = Download(own[:, 0], ranks, values, ids)

    def tell(self, results: list[TokenOutput]) -> None:
        """Add them to the results of all rows, save to those without a token. Waits for the device."""
        numbers = (tensor.tolist() for tensor in self._download.wait())
        for place, count, logprob, rank, values, ids in zip(self._places, self._wanted, *numbers, strict=True):
            result = results[place]
            if result.is_valid:
                top = tuple(zip(ids[:count], values[:count], strict=True))
                result.logprob = TokenLogprob(token=result.token, logprob=logprob, top=top, rank=rank)
