"""Decode attention over cached latents (MLA): one query token a sequence, keys and values of all heads in one row."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.backend import uses_native, uses_triton
from tandem.kernels.latent_decode.reference import latent_decode_reference
from tandem.kernels.layer_view import check_attention_arguments, is_shared
from tandem.kernels.paged_decode import paged_decode

__all__ = ["latent_decode"]


def latent_decode(
    q: Tensor,
    layer_view: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    rank: int,
    scale: float,
    backend: str | None = None,
) -> Tensor:
    """Attend from the last token of every sequence to cached rows; their latents are also the values.

    A row is [latent of `rank` | key that turns with the position]; queries are in the latent space ("absorbed").
    q: `[batch, heads, width]`; layer_view: `[num_blocks, 2, 1, block_tokens, width]`, both planes in the same memory
    (`key_value_view`), another dtype than that of q is converted when read.
    block_table, context_lens: as in `paged_decode`; a context of 0 marks a padding row, which yields zeros.
    Returns `[batch, heads, rank]` in the dtype of q, owned by the caller and not always contiguous. Raises ValueError
    (shapes) or TypeError (dtypes). On CUDA it never synchronises, and its launches depend on shapes alone.
    Source: DeepSeek-V2 (Liu et al. 2024), section 2.1.
    """
    check_attention_arguments(q, layer_view, block_table, context_lens)
    if q.shape[0] != block_table.shape[0]:
        raise ValueError(f"q has {q.shape[0]} sequences, block_table {block_table.shape[0]}")
    if layer_view.shape[2] != 1 or not is_shared(layer_view):
        raise ValueError("layer_view must have one head whose keys and values are the same memory")
    if not 0 < rank < q.shape[2]:
        raise ValueError(f"rank is {rank}, it must be from 1 to {q.shape[2] - 1}, less than a row")
    if q.shape[0] == 0:
        return q.new_empty((0, q.shape[1], rank))
    if uses_triton(q.device, backend):
        from tandem.kernels.latent_decode.triton import latent_decode_triton

        return latent_decode_triton(q, layer_view, block_table, context_lens, rank, scale)
    if uses_native(q.device, backend):
        return paged_decode(q, layer_view, block_table, context_lens, scale=scale, backend=backend)[..., :rank]
    return latent_decode_reference(q, layer_view, block_table, context_lens, rank, scale)
