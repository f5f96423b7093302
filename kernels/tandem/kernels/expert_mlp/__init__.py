"""A layer of experts (Shazeer et al. 2017): every token's rows through the few experts that it chose, added up."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.expert_mlp.reference import expert_mlp_reference
from tandem.kernels.expert_mlp.weights import ExpertWeights, GateActivation

__all__ = ["ExpertWeights", "GateActivation", "expert_mlp"]


def expert_mlp(
    x: Tensor, chosen: Tensor, shares: Tensor, experts: ExpertWeights, *, backend: str | None = None
) -> Tensor:
    """Sum each token's expert answers, by the token's shares: share · down(activation(gate_up(x))).

    x: `[tokens, hidden]` in the dtype of the weights; chosen: int64 `[tokens, per_token]`, experts from 0 to count - 1,
    none twice in a row; shares: fp32 `[tokens, per_token]`.
    Products are added up in fp32; activations and answers are rounded to the dtype; answers are added in fp32 in the
    order of `chosen`, so that a token's sum does not depend on where its experts stand among others.
    Returns `[tokens, hidden]` in the dtype of x, owned by the caller. Raises ValueError (shapes) or TypeError (dtypes).
    On CUDA it never synchronises, and its launches depend on shapes alone.
    """
    if x.dim() != 2 or x.shape[1] != experts.hidden:
        raise ValueError(f"x must be [tokens, {experts.hidden}], got {tuple(x.shape)}")
    if x.dtype is not experts.gate_up.dtype:
        raise TypeError(f"x is {x.dtype}, the experts are {experts.gate_up.dtype}")
    if chosen.dim() != 2 or chosen.shape[0] != x.shape[0] or chosen.shape != shares.shape:
        raise ValueError(
            f"chosen and shares must be [{x.shape[0]}, per_token], got {tuple(chosen.shape)} and {tuple(shares.shape)}"
        )
    if chosen.dtype is not torch.int64 or shares.dtype is not torch.float32:
        raise TypeError(f"chosen must be int64 and shares float32, got {chosen.dtype} and {shares.dtype}")
    if x.shape[0] == 0:
        return torch.empty_like(x)
    if uses_triton(x.device, backend):
        from tandem.kernels.expert_mlp.triton import expert_mlp_triton

        return expert_mlp_triton(x, chosen, shares, experts)
    return expert_mlp_reference(x, chosen, shares, experts)
