"""Changes scores before a token is chosen, in place, for many rows in a few tensor operations: penalties, bias, masks.

A masked token's score is -inf.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.output_matcher import timely_masks
from tandem.engine.runner_protocol import SampleRow
from tandem.engine.sampling_state import ChoiceSampling
from tandem.kernels.token_mask import forbid


def apply_penalties(scores: Tensor, states: Sequence[ChoiceSampling]) -> None:
    """Repetition (Keskar et al. 2019), then presence and frequency (OpenAI); `scores` [n, vocab] has a row a state."""
    _repetition(scores, states)
    rows = [i for i, s in enumerate(states) if s.counts and (s.params.presence_penalty or s.params.frequency_penalty)]
    if not rows:
        return
    ids, counts = array("q"), array("q")
    for row in rows:
        ids.extend(states[row].counts)
        counts.extend(states[row].counts.values())
    lengths = [len(states[row].counts) for row in rows]
    presence = _spread([states[row].params.presence_penalty for row in rows], lengths)
    frequency = _spread([states[row].params.frequency_penalty for row in rows], lengths)
    amounts = presence + frequency * torch.frombuffer(counts, dtype=torch.int64)
    # One row's tokens are distinct, so no order of additions can matter.
    _add(scores, _places(scores, rows, lengths, ids), -amounts)


def apply_bias(scores: Tensor, states: Sequence[ChoiceSampling]) -> None:
    """Add each row's logit bias in place; entries of one token add up."""
    rows = [row for row, state in enumerate(states) if state.has_bias]
    if not rows:
        return
    pairs = [pair for row in rows for pair in states[row].params.logit_bias]
    lengths = [len(states[row].params.logit_bias) for row in rows]
    places = _places(scores, rows, lengths, array("q", [token for token, _ in pairs]))
    _add(scores, places, torch.tensor([bias for _, bias in pairs]))


def apply_masks(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    """Allowed tokens, bad words, the tokens that `min_tokens` keeps back, grammars, and forced tokens; `scores`
    [n, vocab] has a row a row.

    At least one token of every row keeps its score: where a grammar and the others leave none, one of the grammar's.
    IndexError for a token beyond the vocabulary.
    """
    vocab = scores.shape[1]
    guided = [place for place, row in enumerate(rows) if row.sampling.matcher is not None]
    if guided:
        _apply_grammars(scores, guided, [rows[place] for place in guided])
    both = [place for place in guided if rows[place].sampling.has_mask]
    before = scores[both] if both else None  # a copy
    ids = array("q")
    lengths: list[int] = []
    places: list[int] = []
    for place, row in enumerate(rows):
        if not row.sampling.has_mask:
            continue
        if row.sampling.allowed_ids:
            _keep_only(scores[place], row.sampling.allowed_ids)
        banned = row.sampling.banned(row.index, vocab)
        ids.extend(banned)
        lengths.append(len(banned))
        places.append(place)
    if ids:
        if max(ids) >= vocab:  # its place would be in the next row
            raise IndexError(f"token {max(ids)} is beyond the vocabulary of {vocab}")
        offsets = torch.tensor(places).repeat_interleave(torch.tensor(lengths)) * vocab
        scores.view(-1)[(offsets + torch.frombuffer(ids, dtype=torch.int64)).to(scores.device)] = -math.inf
    if before is not None:
        kept = scores[both]
        scores[both] = torch.where(kept.amax(dim=-1, keepdim=True) > -math.inf, kept, before)
    for place, row in enumerate(rows):
        if (token := row.sampling.forced) is not None:
            scores[place] = -math.inf
            scores[place, token] = 0.0


def _apply_grammars(scores: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
    """Forbid the rows at `places` what their grammars do."""
    asked = [(row.sampling.matcher, row.drafts) for row in rows if row.sampling.matcher is not None]
    masks = bytearray().join(timely_masks(asked))
    bits = torch.frombuffer(masks, dtype=torch.uint8).view(len(places), -1).to(scores.device)
    forbid(scores, places, bits)


def _repetition(scores: Tensor, states: Sequence[ChoiceSampling]) -> None:
    """Positive scores of seen tokens are divided by the penalty, negative ones multiplied."""
    rows = [row for row, state in enumerate(states) if state.params.repetition_penalty != 1.0]
    if not rows:
        return
    ids = array("q")
    for row in rows:
        ids.extend(states[row].prompt_ids)
        ids.extend(states[row].new_ids)
    lengths = [len(states[row].prompt_ids) + len(states[row].new_ids) for row in rows]
    penalties = _spread([states[row].params.repetition_penalty for row in rows], lengths)
    places = _places(scores, rows, lengths, ids)
    view, penalty = scores.view(-1), penalties.to(scores)
    seen = view[places]
    view[places] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _places(scores: Tensor, rows: list[int], lengths: list[int], ids: array[int]) -> Tensor:
    """Indices into the flat scores of `ids`, the first lengths[0] of which belong to rows[0], and so on."""
    offsets = torch.tensor(rows).repeat_interleave(torch.tensor(lengths)) * scores.shape[1]
    return (offsets + torch.frombuffer(ids, dtype=torch.int64)).to(scores.device)


def _spread(values: list[float], lengths: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))


def _add(scores: Tensor, places: Tensor, amounts: Tensor) -> None:
    scores.view(-1).index_add_(0, places, amounts.to(scores))


def _keep_only(scores: Tensor, ids: array[int]) -> None:
    """All of one row's scores but those of `ids` become -inf."""
    kept = torch.frombuffer(ids, dtype=torch.int64).to(scores.device)
    values = scores[kept]
    scores.fill_(-math.inf)
    scores[kept] = values
