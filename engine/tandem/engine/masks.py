"""Tokens that may not be chosen: their scores become -inf, in place, for many rows in a few tensor operations."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.sampling_types import SampleRow


def apply_masks(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    """Allowed tokens, bad words and the tokens that `min_tokens` keeps back; `scores` [n, vocab] has a row a row.

    At least one token of every row keeps its score. IndexError for a token beyond the vocabulary.
    """
    vocab = scores.shape[1]
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


def _keep_only(scores: Tensor, ids: array[int]) -> None:
    """All of one row's scores but those of `ids` become -inf."""
    kept = torch.frombuffer(ids, dtype=torch.int64).to(scores.device)
    values = scores[kept]
    scores.fill_(-math.inf)
    scores[kept] = values
