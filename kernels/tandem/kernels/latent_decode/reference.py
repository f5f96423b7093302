"""latent_decode in torch: the specification. Synchronises on an accelerator."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.paged_decode.reference import paged_decode_reference


def latent_decode_reference(
    q: Tensor, layer_view: Tensor, block_table: Tensor, context_lens: Tensor, rank: int, scale: float
) -> Tensor:
    """See `latent_decode`: attention over one KV head with its keys as values; the latent part is kept."""
    spec = AttentionSpec(scale=scale)
    return paged_decode_reference(q, layer_view, block_table, context_lens, spec)[..., :rank]
