"""Penalties and bias on scores, in place, for many rows in a few tensor operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tandem.engine.sampler import ChoiceSampling


def apply_penalties(scores: Tensor, states: Sequence[ChoiceSampling]) -> None:
    """Repetition (Keskar et al. 2019), then presence and frequency (OpenAI); `scores` [n, vocab] has a row a state."""
    _repetition(scores, states)
    rows: list[int] = []
    ids: list[int] = []
    amounts: list[float] = []
    for row, state in enumerate(states):
        presence, frequency = state.params.presence_penalty, state.params.frequency_penalty
        if presence or frequency:
            rows.extend([row] * len(state.counts))
            ids.extend(state.counts)
            amounts.extend([presence + frequency * count for count in state.counts.values()])
    _add(scores, rows, ids, amounts, -1)


def apply_bias(scores: Tensor, states: Sequence[ChoiceSampling]) -> None:
    """Add each row's logit bias in place; entries of one token add up."""
    rows: list[int] = []
    ids: list[int] = []
    amounts: list[float] = []
    for row, state in enumerate(states):
        for token, bias in state.params.logit_bias:
            rows.append(row)
            ids.append(token)
            amounts.append(bias)
    _add(scores, rows, ids, amounts, 1)


def _repetition(scores: Tensor, states: Sequence[ChoiceSampling]) -> None:
    """Positive scores of seen tokens are divided by the penalty, negative ones multiplied."""
    parts: list[Tensor] = []
    rows: list[int] = []
    lengths: list[int] = []
    penalties: list[float] = []
    for row, state in enumerate(states):
        penalty = state.params.repetition_penalty
        if penalty == 1.0:
            continue
        parts += [state.prompt_ids, torch.tensor(state.new_ids, dtype=torch.int64)]
        rows.append(row)
        lengths.append(len(state.prompt_ids) + len(state.new_ids))
        penalties.append(penalty)
    if not rows:
        return
    counts = torch.tensor(lengths)
    row_of = torch.tensor(rows).repeat_interleave(counts)
    flat = (row_of * scores.shape[1] + torch.cat(parts)).to(scores.device)
    penalty_of = torch.tensor(penalties, dtype=scores.dtype).repeat_interleave(counts).to(scores.device)
    view = scores.view(-1)
    seen = view[flat]
    view[flat] = torch.where(seen > 0, seen / penalty_of, seen * penalty_of)


def _add(scores: Tensor, rows: list[int], ids: list[int], amounts: list[float], sign: int) -> None:
    if not rows:
        return
    flat = torch.tensor(rows) * scores.shape[1] + torch.tensor(ids)
    values = torch.tensor(amounts, dtype=scores.dtype)
    # One row's tokens are distinct (penalties) or few (bias), so the order of additions cannot vary.
    scores.view(-1).index_add_(0, flat.to(scores.device), values.to(scores.device), alpha=sign)
