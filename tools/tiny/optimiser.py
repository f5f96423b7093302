"""Muon for the matrices and AdamW for the rest, with a state that is plain tensors and so fits a safetensors file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_MOMENTUM = 0.95
_BETAS = (0.9, 0.98)
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class MuonAdamW:
    """One optimiser step over named parameters.

    Muon (Keller Jordan, 2024: orthogonalised momentum by five Newton-Schulz steps) moves the matrices of the layers;
    AdamW moves the embedding and the norms.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], *, muon_lr: float, adam_lr: float, decay: float) -> None:
        self.muon_lr, self.adam_lr, self.decay = muon_lr, adam_lr, decay
        self.matrices: dict[str, Tensor] = {}
        self.others: dict[str, Tensor] = {}
        for name, parameter in named:
            (self.matrices if parameter.ndim == 2 and ".layers." in name else self.others)[name] = parameter
        self.state: dict[str, Tensor] = {}
        for name, parameter in self.matrices.items():
            self.state[f"{name}:momentum"] = torch.zeros_like(parameter)
        for name, parameter in self.others.items():
            self.state[f"{name}:mean"] = torch.zeros_like(parameter)
            self.state[f"{name}:square"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, number: int, scale: float) -> None:
        """Step ``number`` (from 1) with both learning rates times ``scale``; gradients are read from ``.grad``."""
        by_shape: dict[torch.Size, list[str]] = defaultdict(list)
        for name, parameter in self.matrices.items():
            by_shape[parameter.shape].append(name)
        for shape, names in by_shape.items():
            grads = torch.stack([_gradient(self.matrices[n]) for n in names])
            momenta = torch.stack([self.state[f"{n}:momentum"] for n in names])
            momenta.lerp_(grads, 1 - _MOMENTUM)
            updates = _orthogonalise(grads.lerp_(momenta, _MOMENTUM))
            rate = self.muon_lr * scale * max(1.0, shape[0] / shape[1]) ** 0.5
            for name, momentum, update in zip(names, momenta, updates, strict=True):
                self.state[f"{name}:momentum"].copy_(momentum)
                self.matrices[name].mul_(1 - self.muon_lr * scale * self.decay).add_(update.float(), alpha=-rate)
        for name, parameter in self.others.items():
            self._adam(name, parameter, number, scale)

    def _adam(self, name: str, parameter: Tensor, number: int, scale: float) -> None:
        grad = _gradient(parameter)
        mean, square = self.state[f"{name}:mean"], self.state[f"{name}:square"]
        mean.lerp_(grad, 1 - _BETAS[0])
        square.lerp_(grad.square(), 1 - _BETAS[1])
        denominator = (square / (1 - _BETAS[1] ** number)).sqrt_().add_(1e-10)
        parameter.addcdiv_(mean, denominator, value=-self.adam_lr * scale / (1 - _BETAS[0] ** number))


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ValueError("a parameter without a gradient: the graph does not reach it")
    return parameter.grad


def _orthogonalise(batch: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to ``batch`` [n, rows, columns], roughly, in bfloat16."""
    a, b, c = _NEWTON_SCHULZ
    x: Tensor = batch.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
