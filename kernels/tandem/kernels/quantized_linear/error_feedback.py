"""GPTQ (Frantar et al. 2023): the error of a weight's number is made good by the numbers behind it.

A product's error is that of all its inputs together. Where inputs of two columns go together, a number that was rounded
up is made good by one that is rounded down. How inputs go together is what their mean products tell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.quantized_linear.reference import GROUP

DAMPING = 0.2
"""Of a column's mean square that no other column shares: mean products of a text are not those of all texts."""
LEAST_SHARE = 1e-3
"""Of the mean square of all columns, the same."""


def squares_of(importance: Tensor | None) -> Tensor | None:
    """Mean squares `[inner]` of `importance`, which is that or mean products `[inner, inner]`."""
    return importance.diagonal() if importance is not None and importance.dim() == 2 else importance


def error_feedback(importance: Tensor | None) -> Tensor | None:
    """fp32 `[padded, padded]` with `padded` the inner numbers up to whole groups: [i, j] is the share of the error of
    number i that is taken off number j > i, once i is rounded, for the least error of the product that is left. None
    where no mean products `[inner, inner]` are given, or some are not finite.

    With H the damped products, it is the upper Cholesky factor of H's inverse, each row over its diagonal. One thread
    computes it, in fp64, so that a weight does not depend on a worker's threads.
    """
    if importance is None or importance.dim() == 1 or not bool(importance.isfinite().all()):
        return None
    inner = len(importance)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        damped = importance.double()
        squares = damped.diagonal()
        squares.add_(DAMPING * squares + LEAST_SHARE * squares.mean() + torch.finfo(torch.float32).tiny)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        del damped, squares
        upper = torch.linalg.cholesky(inverse, upper=True)
    finally:
        torch.set_num_threads(threads)
    padded = -(-inner // GROUP) * GROUP
    feedback = torch.zeros((padded, padded))
    feedback[:inner, :inner] = upper / upper.diagonal()[:, None]
    return feedback
