"""A layer of experts: against its reference, then weights read and products computed a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.gpu.machine import seconds
from bench.gpu.report import Case, Report
from tandem.kernels.expert_mlp import ExpertWeights, GateActivation, expert_mlp

TOLERANCES = {torch.float32: 2e-5, torch.float16: 1.2e-2, torch.bfloat16: 1e-1}
"""Tolerance for answers up to 8 or so: two or three units in the last place of the largest, as answer and sum are
rounded."""
BATCHES = (1, 16, 64, 256, 4096)
_CHOICES = 8
"""Different choices of a batch that are cycled through: one token's experts fit the cache of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a layer; `is_clamped` experts have biases, too."""

    count: int
    per_token: int
    hidden: int
    features: int
    is_clamped: bool = False

    def random(self, device: torch.device, dtype: torch.dtype) -> ExpertWeights:
        def drawn(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype).mul_(columns**-0.5)

        gate_up = drawn(self.count * 2 * self.features, self.hidden)
        down = drawn(self.count * self.hidden, self.features)
        if not self.is_clamped:
            return ExpertWeights(count=self.count, gate_up=gate_up, down=down)
        biases = [torch.randn(matrix.shape[0], device=device, dtype=dtype) for matrix in (gate_up, down)]
        return ExpertWeights(
            count=self.count, gate_up=gate_up, down=down, gate_up_bias=biases[0], down_bias=biases[1],
            gate=GateActivation(kind="clamped", alpha=1.702, limit=7.0),
        )  # fmt: skip

    def choices(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        shares, chosen = torch.softmax(torch.randn(tokens, self.count, device=device), -1).topk(self.per_token, -1)
        return chosen, shares


SHAPES = {
    "mixtral 8x7b": Shape(count=8, per_token=2, hidden=4096, features=14336),
    "qwen3 30b": Shape(count=128, per_token=8, hidden=2048, features=768),
    "deepseek v2 lite": Shape(count=64, per_token=6, hidden=2048, features=1408),
    "gpt-oss 20b": Shape(count=32, per_token=4, hidden=2880, features=2880, is_clamped=True),
}
SMALL = {
    "plain": Shape(count=8, per_token=2, hidden=256, features=160),
    "clamped": Shape(count=32, per_token=4, hidden=192, features=96, is_clamped=True),
    "uneven": Shape(count=5, per_token=3, hidden=72, features=40),
}
REHEARSAL = Shape(count=4, per_token=2, hidden=32, features=16, is_clamped=True)


def correctness(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    for dtype in [torch.float32] if rehearsal else list(TOLERANCES):
        for name, shape in {"clamped": REHEARSAL}.items() if rehearsal else SMALL.items():
            case = f"experts {name} {str(dtype).removeprefix('torch.')}"
            tokens = (5,) if rehearsal else (1, 7, 64, 300, 3000)
            yield case, partial(_compare, name=case, device=device, dtype=dtype, shape=shape, batches=tokens)


def speed(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    """One case a shape, as its weights are drawn once."""
    for name, shape in {"tiny": REHEARSAL}.items() if rehearsal else SHAPES.items():
        batches = (2,) if rehearsal else BATCHES
        yield f"experts {name}", partial(_speed, name=f"experts {name}", device=device, shape=shape, batches=batches)


def _compare(
    report: Report, name: str, device: torch.device, dtype: torch.dtype, shape: Shape, batches: tuple[int, ...]
) -> None:
    """Also where all tokens choose the same experts, and most have none."""
    experts, worst = shape.random(device, dtype), 0.0
    for tokens in batches:
        x, (chosen, shares) = (
            torch.randn(tokens, shape.hidden, device=device, dtype=dtype),
            shape.choices(tokens, device),
        )
        for chosen_now in (chosen, chosen[:1].expand_as(chosen).contiguous()):
            found = expert_mlp(x, chosen_now, shares, experts, backend="triton").float()
            expected = expert_mlp(x, chosen_now, shares, experts, backend="reference").float()
            worst = max(worst, float((found - expected).abs().max()))
    report.add(name, "largest difference", worst, "error", TOLERANCES[dtype])


def _speed(report: Report, name: str, device: torch.device, shape: Shape, batches: tuple[int, ...]) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    experts = shape.random(device, dtype)
    expert_numbers = 3 * shape.hidden * shape.features
    copied, peak = (report.value("machine", what) for what in ("copy bandwidth", "matmul rate"))
    for tokens in batches:
        x = torch.randn(tokens, shape.hidden, device=device, dtype=dtype)
        choices = [shape.choices(tokens, device) for _ in range(_CHOICES)]
        met = sum(len(set(chosen.flatten().tolist())) for chosen, _ in choices) / _CHOICES

        def walk(x: Tensor = x, choices: list[tuple[Tensor, Tensor]] = choices) -> None:
            for chosen, shares in choices:
                expert_mlp(x, chosen, shares, experts, backend="triton")

        taken, case = seconds(device, walk) / _CHOICES, f"{name} {tokens} tokens"
        report.add(case, "time", taken * 1e6, "us")
        report.add(case, "weights read", met * expert_numbers * x.element_size() / taken / 1e9, "GB/s", copied)
        flops = 2.0 * tokens * shape.per_token * expert_numbers
        report.add(case, "rate", flops / taken / 1e12, "TFLOP/s", peak)
