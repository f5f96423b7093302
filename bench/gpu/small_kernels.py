"""Norms, rotations, gates and the drawing of tokens: against their references, then bytes moved a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu.machine import seconds
from bench.gpu.report import Case, Report
from tandem.kernels.rms_norm import rms_norm
from tandem.kernels.rope import rotate
from tandem.kernels.sample import choose_token
from tandem.kernels.silu_mul import silu_mul

TOLERANCES = {torch.float32: 4e-6, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""A unit in the last place, or two, of the largest results for inputs of unit variance."""
WIDTHS = [(1, 16), (3, 576), (300, 1023), (64, 5120)]
ROWS = (1, 64, 2048)
VOCAB = 151_936


def correctness(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    for dtype in [torch.float32] if rehearsal else list(TOLERANCES):
        name = str(dtype).removeprefix("torch.")
        shapes = [(2, 33)] if rehearsal else WIDTHS
        yield f"rows {name}", partial(_rows, device=device, dtype=dtype, name=name, shapes=shapes)
    yield "choose_token", partial(_choose, device=device, rows=2 if rehearsal else 64, vocab=60 if rehearsal else VOCAB)


def speed(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    for rows in (2,) if rehearsal else ROWS:
        yield f"rows {rows}", partial(_speed, device=device, rows=rows, width=64 if rehearsal else 4096)
    for rows in (1,) if rehearsal else (1, 16, 64, 256):
        name = f"choose_token {rows} rows"
        yield name, partial(_choose_speed, name=name, device=device, rows=rows, vocab=60 if rehearsal else VOCAB)


def _rows(
    report: Report, device: torch.device, dtype: torch.dtype, name: str, shapes: list[tuple[int, int]]
) -> None:  # fmt: skip
    worst = dict.fromkeys(("rms_norm", "rms_norm of a sum", "rotate", "silu_mul"), 0.0)

    def compare(case: str, run: Callable[[str], Tensor]) -> None:
        difference = (run("triton").float() - run("reference").float()).abs().max()
        worst[case] = max(worst[case], float(difference))

    for rows, width in shapes:
        x, added, gate_up = torch.randn(3, rows, 2 * width, device=device, dtype=dtype)
        weight, table = (
            torch.randn(width, device=device, dtype=dtype),
            torch.randn(rows, 2, 64, device=device).to(dtype),
        )
        heads = torch.randn(rows, 5, 64, device=device, dtype=dtype)
        x, added = x[:, :width], added[:, :width].contiguous()
        compare("rms_norm", partial(_norm, x, weight, None))
        compare("rms_norm of a sum", partial(_norm, x, weight, added))
        compare("rotate", partial(_turned, heads, table))
        compare("silu_mul", partial(_gated, gate_up))
    for case, value in worst.items():
        report.add(f"{case} {name}", "largest difference", value, "error", TOLERANCES[dtype])


def _norm(x: Tensor, weight: Tensor, added: Tensor | None, backend: str) -> Tensor:
    """The norm and the changed x."""
    x = x.clone()
    return torch.cat((rms_norm(x, weight, 1e-6, added=added, backend=backend), x))


def _turned(heads: Tensor, table: Tensor, backend: str) -> Tensor:
    return rotate(heads.clone(), table[:, 0], table[:, 1], backend=backend)


def _gated(gate_up: Tensor, backend: str) -> Tensor:
    return silu_mul(gate_up, backend=backend)


def _draws(device: torch.device, rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scores like a model's, and filters like requests'."""
    scores = torch.randn(rows, vocab, device=device) * 3
    scores -= scores.amax(-1, keepdim=True)
    top_k = torch.tensor([(0, 50)[i % 2] for i in range(rows)], device=device)
    top_p = torch.tensor([(0.9, 1.0, 0.99)[i % 3] for i in range(rows)], device=device, dtype=torch.float64)
    min_p = torch.tensor([(0.0, 0.05)[i % 5 == 0] for i in range(rows)], device=device, dtype=torch.float64)
    return scores, top_k, top_p, min_p, torch.rand(rows, device=device, dtype=torch.float64)


def _choose(report: Report, device: torch.device, rows: int, vocab: int) -> None:
    arguments = _draws(device, rows, vocab)
    wrong = int((choose_token(*arguments, backend="triton") != choose_token(*arguments, backend="reference")).sum())
    report.add("choose_token", "tokens that differ", wrong, "error", 0)


def _speed(report: Report, device: torch.device, rows: int, width: int) -> None:
    """Speeds for a model of 8B: hidden 4,096, 40 heads of 128 that turn, 14,336 features."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, added = torch.randn(2, rows, width, device=device, dtype=dtype)
    weight, gate_up = (
        torch.ones(width, device=device, dtype=dtype),
        torch.randn(rows, 7 * width, device=device, dtype=dtype),
    )
    heads, table = (
        torch.randn(rows, 40, 128, device=device, dtype=dtype),
        torch.ones(rows, 2, 128, device=device).to(dtype),
    )
    copied = report.value("machine", "copy bandwidth")
    size = x.element_size()
    for name, numbers, run in (
        ("rms_norm of a sum", 4 * x.numel(), lambda: rms_norm(x, weight, 1e-6, added=added, backend="triton")),
        ("rotate", 2 * heads.numel() + table.numel(), lambda: _in_place(heads, table)),
        ("silu_mul", gate_up.numel() * 3 // 2, lambda: silu_mul(gate_up, backend="triton")),
    ):
        taken = seconds(device, run)
        report.add(f"{name} {rows} rows", "time", taken * 1e6, "us")
        report.add(f"{name} {rows} rows", "moved", numbers * size / taken / 1e9, "GB/s", copied)


def _in_place(heads: Tensor, table: Tensor) -> Tensor:
    return rotate(heads, table[:, 0], table[:, 1], backend="triton")


def _choose_speed(report: Report, name: str, device: torch.device, rows: int, vocab: int) -> None:
    arguments = _draws(device, rows, vocab)
    report.add(name, "time", seconds(device, partial(choose_token, *arguments, backend="triton")) * 1e6, "us")
    scores = arguments[0]
    report.add(name, "time of sorting", seconds(device, partial(torch.sort, scores, dim=-1)) * 1e6, "us")
