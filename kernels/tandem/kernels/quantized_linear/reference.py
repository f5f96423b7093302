"""quantized_linear in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Inner numbers of 4 bits that share a scale and an offset."""
PLANE = 255
"""Of a row's number of 16 bits: it is PLANE · a number of 8 bits + another."""
MOST = {8: 127.0, 16: 127.0 * PLANE + 127.0}
"""A row's largest number, by its bits."""
OUTLIERS = 32
"""Inner numbers of a weight that have a second number of 8 bits."""
OUTLIER_STEP = 128
"""The second number has steps so many times smaller."""
LEAST = 1e-30
"""Rows and columns of smaller numbers are taken for zeros: their scale has no reciprocal."""
_TOP_NUMBER = 120.0
"""Of 4 bits, a column's largest number before it is rounded."""
_STEP_SHARES = (0.75, 1.05)
"""Scales of 4 bits that are tried, as shares of the one with which a group's numbers span all."""


def quantize_rows_reference(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """x `[rows, inner]` as whole numbers up to `MOST[bits]`, and fp32 scales `[rows]`, NaN where x is not finite."""
    wide = x.float()
    top = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    is_used = top >= LEAST
    numbers = (wide * torch.where(is_used, _over(MOST[bits], top), 0.0)[:, None]).round_()
    scales = torch.where(is_used, top / MOST[bits], 0.0)
    finite = top.isfinite()
    return numbers.nan_to_num_(0.0).to(torch.int8 if bits == 8 else torch.int16), torch.where(finite, scales, torch.nan)


def with_outliers_reference(x: Tensor, outliers: Tensor | None) -> Tensor:
    """x `[rows, inner]` with its columns `outliers`, over OUTLIER_STEP, behind the others."""
    return x if outliers is None else torch.cat((x, x[:, outliers.long()] / OUTLIER_STEP), 1)


def outlier_numbers_reference(weight: Tensor, numbers: Tensor, scales: Tensor, outliers: Tensor) -> Tensor:
    """Second numbers `[columns, len(outliers)]`, int8: OUTLIER_STEP times what `numbers` and `scales` of a `weight`
    `[columns, inner]` leave of it. Together they are numbers of 15 bits."""
    chosen = outliers.long()
    by = torch.where(scales > 0, _over(OUTLIER_STEP, scales), 0.0)[:, None]
    rest = weight[:, chosen].float() - numbers[:, chosen] * scales[:, None]
    return (rest * by).round_().clamp_(-127, 127).to(torch.int8)


def planes_reference(numbers: Tensor) -> Tensor:
    """Numbers `[rows, inner]` of 16 bits as two rows of int8 each: number = PLANE · first + second."""
    first = (numbers / PLANE).round_()
    return torch.stack((first, numbers - PLANE * first), 1).flatten(0, 1).to(torch.int8)


def quantize_weight_reference(
    weight: Tensor, bits: int, importance: Tensor | None = None, feedback: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """weight `[columns, inner]` as int8 numbers and fp32 scales `[columns]`: weight ≈ numbers · scale.

    Of 4 bits the numbers are s · q + o with q from -8 to 7, and for 32 neighbours one s from 1 to 15 and one o: those
    of the least squared error that are found; the column's scale fits the chosen numbers by least squares. Squared
    errors are weighted by `importance` `[inner]`, positive, where there is one. Two levels of scales with whole numbers
    between them are Lin et al. 2024 (QServe), section 4.1. With `feedback` (see `error_feedback`) the numbers behind
    one make good its error, and a column's largest number alone gives its scale.
    """
    if bits == 8:
        return quantize_rows_reference(weight)
    inner = weight.shape[1]
    by = torch.nn.functional.pad(torch.ones(inner) if importance is None else importance.float(), (0, -inner % GROUP))
    wide = torch.nn.functional.pad(weight.float(), (0, -inner % GROUP))
    top = wide.abs().amax(1)
    targets = wide * torch.where(top >= LEAST, _over(_TOP_NUMBER, top), 0.0)[:, None]
    values = torch.zeros_like(targets)
    for first in range(0, inner, GROUP):
        last = first + GROUP
        group = targets[:, first:last]
        scale, offset = _grid(group, by[first:last])
        if feedback is not None:
            errors = torch.empty_like(group)
            for one in range(GROUP):
                target = group[:, one]
                errors[:, one] = target - scale * _nearest(target, scale, offset) - offset
                group[:, one + 1 :] -= errors[:, one, None] * feedback[first + one, first + one + 1 : last]
            targets[:, last:] -= errors @ feedback[first:last, last:]
        values[:, first:last] = scale[:, None] * _nearest(group, scale[:, None], offset[:, None]) + offset[:, None]
    if feedback is not None:
        return values[:, :inner].to(torch.int8), torch.where(top >= LEAST, top / _TOP_NUMBER, 0.0)
    wanted, found = targets[:, :inner].double(), values[:, :inner].double()
    weighted = found * by[:inner].double()
    met, own = (wanted * weighted).sum(1), (found * weighted).sum(1)
    fitted = torch.where(own > 0, top.double() / _TOP_NUMBER * (met / own), 0.0)
    return values[:, :inner].to(torch.int8), fitted.float()


def _grid(targets: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets `[columns]` of one group: targets `[columns, GROUP]`, errors weighted `by` `[GROUP]`."""
    low, high = targets.amin(1), targets.amax(1)
    step = (high - low) / 15
    first, last = (_STEP_SHARES[0] * step).floor().clamp_(1, 15), (_STEP_SHARES[1] * step).ceil().clamp_(1, 15)
    best, chosen, least = torch.ones_like(step), torch.zeros_like(step), torch.full_like(step, torch.inf)
    for number in range(1, 16):
        scale = torch.full_like(step, number)
        for start in ((low + high + scale) / 2, low + 8 * scale, high - 7 * scale):
            offset = start.round()
            for _ in range(2):
                rest = (targets - number * _nearest(targets, scale[:, None], offset[:, None])) * by
                offset = (rest.sum(1) / by.sum()).round_().clamp_(8 * number - 127, 127 - 7 * number)
            values = number * _nearest(targets, scale[:, None], offset[:, None]) + offset[:, None]
            error = (targets - values).square_().mul_(by).sum(1)
            is_better = (error < least) & (first <= scale) & (scale <= last)
            best[is_better], chosen[is_better], least[is_better] = scale[is_better], offset[is_better], error[is_better]
    return best, chosen


def _nearest(targets: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return ((targets - offset) * (1.0 / scale)).round_().clamp_(-8, 7)


def quantized_linear_reference(
    x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None, row_bits: int = 8, outliers: Tensor | None = None
) -> Tensor:
    """x `[rows, inner]` in float32 or bfloat16, rows quantised, times the weight: `[rows, columns]` in x's dtype.

    (exact sum · column's scale) · row's scale + bias, in fp32 and rounded once. `numbers` `[columns, inner]` have those
    of `outliers` behind them, `[columns, inner + len(outliers)]`.
    """
    rows, row_scales = quantize_rows_reference(with_outliers_reference(x, outliers), row_bits)
    sums = rows.double() @ numbers.double().t()  # whole numbers below 2^53: exact in any order
    out = sums.float().mul_(scales).mul_(row_scales[:, None])
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


def _over(number: float, numbers: Tensor) -> Tensor:
    """number / numbers, rounded once: `number / tensor` multiplies with a rounded reciprocal."""
    return torch.full_like(numbers, number) / numbers
