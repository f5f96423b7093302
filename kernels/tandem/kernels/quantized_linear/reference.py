"""quantized_linear in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Inner numbers of 4 bits that share a scale."""
PLANE = 255
"""Of a row's number of 16 bits: it is PLANE · a number of 8 bits + another."""
MOST = {8: 127.0, 16: 127.0 * PLANE + 127.0}
"""A row's largest number, by its bits."""
LEAST = 1e-30
"""Rows and columns of smaller numbers are taken for zeros: their scale has no reciprocal."""
_TOP_SHARES = (0.7, 1.15)
"""Scales of 4 bits that are tried, as shares of the one with which a group's largest number is an 8."""


def quantize_rows_reference(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """x `[rows, inner]` as whole numbers up to `MOST[bits]`, and fp32 scales `[rows]`, NaN where x is not finite."""
    wide = x.float()
    top = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    is_used = top >= LEAST
    numbers = (wide * torch.where(is_used, _over(MOST[bits], top), 0.0)[:, None]).round_()
    scales = torch.where(is_used, top / MOST[bits], 0.0)
    finite = top.isfinite()
    return numbers.nan_to_num_(0.0).to(torch.int8 if bits == 8 else torch.int16), torch.where(finite, scales, torch.nan)


def planes_reference(numbers: Tensor) -> Tensor:
    """Numbers `[rows, inner]` of 16 bits as two rows of int8 each: number = PLANE · first + second."""
    first = (numbers / PLANE).round_()
    return torch.stack((first, numbers - PLANE * first), 1).flatten(0, 1).to(torch.int8)


def quantize_weight_reference(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """weight `[columns, inner]` as int8 numbers and fp32 scales `[columns]`: weight ≈ numbers · scale.

    Of 4 bits the numbers are q · s with q from -8 to 7 and one s from -15 to 15 for 32 neighbours: the s with the least
    squared error, and the column's scale fits the chosen numbers by least squares. Two levels of scales with whole
    numbers between them are Lin et al. 2024 (QServe), section 4.1.
    """
    if bits == 8:
        return quantize_rows_reference(weight)
    columns, inner = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -inner % GROUP))
    top = wide.abs().amax(1)
    is_used = top >= LEAST
    targets = (wide * torch.where(is_used, _over(120.0, top), 0.0)[:, None]).view(columns, -1, GROUP)
    highest = targets.abs().amax(2) / 8
    low, high = (_TOP_SHARES[0] * highest).floor().clamp_(1), (_TOP_SHARES[1] * highest).ceil().clamp_(max=15)
    best, least = torch.zeros_like(targets), (targets * targets).sum(2)
    least[highest >= 1 / 64] = torch.inf
    for size in range(1, 16):
        for scale in (-size, size):
            values = (targets * (1.0 / scale)).round_().clamp_(-8, 7) * scale
            error = (targets - values).square_().sum(2)
            is_better = (error < least) & (size >= low) & (size <= high)
            best[is_better], least[is_better] = values[is_better], error[is_better]
    values = best.view(columns, -1)
    met, own = (targets.view(columns, -1) * values).sum(1), (values * values).sum(1)
    fitted = torch.where(own > 0, top / 120.0 * (met / own), 0.0)
    return values[:, :inner].to(torch.int8), fitted


def quantized_linear_reference(
    x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None, row_bits: int = 8
) -> Tensor:
    """x `[rows, inner]` in float32 or bfloat16, rows quantised, times the weight: `[rows, columns]` in x's dtype.

    (exact sum · column's scale) · row's scale + bias, in fp32 and rounded once.
    """
    rows, row_scales = quantize_rows_reference(x, row_bits)
    sums = rows.double() @ numbers.double().t()  # whole numbers below 2^53: exact in any order
    out = sums.float().mul_(scales).mul_(row_scales[:, None])
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


def _over(number: float, numbers: Tensor) -> Tensor:
    """number / numbers, rounded once: `number / tensor` multiplies with a rounded reciprocal."""
    return torch.full_like(numbers, number) / numbers
