"""expert_mlp in torch, one expert after another: the specification. Synchronises on an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tandem.kernels.expert_mlp.weights import CLAMPED, GELU_TANH, ExpertWeights, GateActivation


def expert_mlp_reference(x: Tensor, chosen: Tensor, shares: Tensor, experts: ExpertWeights) -> Tensor:
    """See `expert_mlp`."""
    answers = x.new_empty((*chosen.shape, experts.hidden))
    gate_ups = experts.gate_up.view(experts.count, -1, experts.hidden)
    downs = experts.down.view(experts.count, -1, experts.features)
    for number in range(experts.count):
        tokens, places = (chosen == number).nonzero(as_tuple=True)
        gate_up = x[tokens].float() @ gate_ups[number].float().t()
        if experts.gate_up_bias is not None:
            gate_up += experts.gate_up_bias.view(experts.count, -1)[number]
        activated = activate(gate_up, experts.gate).to(x.dtype)
        answer = activated.float() @ downs[number].float().t()
        if experts.down_bias is not None:
            answer += experts.down_bias.view(experts.count, -1)[number]
        answers[tokens, places] = answer.to(x.dtype)
    total = torch.zeros_like(x, dtype=torch.float32)
    for place in range(chosen.shape[1]):
        total += answers[:, place].float() * shares[:, place, None]
    return total.to(x.dtype)


def activate(gate_up: Tensor, kind: GateActivation) -> Tensor:
    """fp32 [rows, 2 · features], gate first, to [rows, features]."""
    gate, up = gate_up.chunk(2, -1)
    if kind.kind == CLAMPED:
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return (up + 1) * gate * torch.sigmoid(kind.alpha * gate)
    if kind.kind == GELU_TANH:
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up
