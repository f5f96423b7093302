"""Attention over contiguous keys and values with a GQA group's queries packed as rows: the specification in torch.

    q   [n, rows, width]    n = sequences x kv heads, rows = query tokens x group (token slowest)
    k,v [n, span, width]

Owns the arithmetic that the decode and extend references share, one span of keys at a time, and the merging of spans.
It must not know about blocks. Softmax is computed in fp32. On a CPU the two products run in the storage dtype where it
multiplies that, because casting half-precision keys and values doubles the time; elsewhere they run in fp32: on other
devices so that a kernel is compared with something more exact than itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.kernels.dtypes import product_dtype

_MASKED = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How scores are made and which keys a query sees, apart from causality.

    scale multiplies q.k; softcap c replaces a scaled score s by c * tanh(s / c) (Gemma 2, section 2); with window w the
    query at position p sees keys p - w < j <= p (Mistral 7B, section 2). sinks: fp32 `[q_heads]`, a learned logit for
    each head that joins the softmax's denominator and brings no value (gpt-oss; Xiao et al. 2023, section 3.3).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}")
        if self.sinks is not None and self.sinks.dtype is not torch.float32:
            raise TypeError(f"sinks must be float32, got {self.sinks.dtype}")

    def check_sinks(self, q_heads: int) -> None:
        """Raise ValueError unless there are no sinks, or one for each query head."""
        if self.sinks is not None and (self.sinks.shape != (q_heads,) or not self.sinks.is_contiguous()):
            raise ValueError(f"sinks must be [{q_heads}] and contiguous, got {tuple(self.sinks.shape)}")

    def sinks_of_rows(self, kv_heads: int, *, sequences: int = 1, tokens: int = 1) -> Tensor | None:
        """Each packed row's sink, `[sequences * kv_heads, tokens * group, 1]`; None without sinks."""
        return None if self.sinks is None else self.sinks.view(kv_heads, -1).repeat(sequences, tokens)[..., None]


def attend_span(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, spec: AttentionSpec, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to one span of keys. Returns (scores in fp32, output in the dtype of the products).

    hidden: bool `[n or 1, rows, span]`, true where a query must not see a key; None hides nothing. A row that sees no
    key of the span gets a finite, meaningless output; its weight in `SpanMerger` is zero. sinks: of the rows, for one
    span of all that are merged; they are the last column of its scores.
    """
    wide = product_dtype(q.dtype, q.device) if q.device.type == "cpu" else torch.float32
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, _MASKED)
    if sinks is not None:
        scores = torch.cat((scores, sinks), -1)
        return scores, torch.bmm(torch.softmax(scores, -1)[..., :-1].to(v.dtype), v)
    return scores, torch.bmm(torch.softmax(scores, -1).to(v.dtype), v)


class SpanMerger:
    """Merges the outputs of disjoint spans of keys by their log-sum-exp (FlashAttention, section 3.1)."""

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._log_sum: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self._output is None

    def add(self, scores: Tensor, output: Tensor) -> None:
        """Take in one span: its fp32 scores `[n, rows, span]` and its normalised output `[n, rows, width]`."""
        log_sum = torch.logsumexp(scores, -1, keepdim=True)
        if self._output is None or self._log_sum is None:
            self._output, self._log_sum = output.float(), log_sum
            return
        merged = torch.logaddexp(self._log_sum, log_sum)
        kept, added = torch.exp(self._log_sum - merged), torch.exp(log_sum - merged)
        self._output = self._output * kept + output.float() * added
        self._log_sum = merged

    def output(self) -> Tensor:
        """The merged output, fp32. Raises ValueError before any span was added."""
        if self._output is None:
            raise ValueError("no span was added")
        return self._output
