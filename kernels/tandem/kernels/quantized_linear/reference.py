"""quantized_linear in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Inner numbers of 4 bits that share a scale."""
LEAST = 1e-30
"""Rows and columns of smaller numbers are taken for zeros: their scale has no reciprocal."""
_TOP_SHARES = (0.7, 1.15)
"""Scales of 4 bits that are tried, as shares of the one with which a group's largest number is an 8."""


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[rows, inner]` as int8 from -127 to 127 and fp32 scales `[rows]`; of a row that is not finite NaN."""
    wide = x.float()
    top = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    is_used = top >= LEAST
    numbers = (wide * torch.where(is_used, _over(127.0, top), 0.0)[:, None]).round_()
    scales = torch.where(is_used, top / 127.0, 0.0)
    finite = top.isfinite()
    return numbers.nan_to_num_(0.0).to(torch.int8), torch.where(finite, scales, torch.nan)


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


def quantized_linear_reference(x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x `[rows, inner]` in float32 or bfloat16, rows quantised, times the weight: `[rows, columns]` in x's dtype.

    (exact sum · column's scale) · row's scale + bias, in fp32 and rounded once.
    """
    rows, row_scales = quantize_rows_reference(x)
    sums = rows.double() @ numbers.double().t()  # whole numbers below 2^53: exact in any order
    out = sums.float().mul_(scales).mul_(row_scales[:, None])
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


def _over(number: float, numbers: Tensor) -> Tensor:
    """number / numbers, rounded once: `number / tensor` multiplies with a rounded reciprocal."""
    return torch.full_like(numbers, number) / numbers
