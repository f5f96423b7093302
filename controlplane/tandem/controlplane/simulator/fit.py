"""Three non-negative coefficients by least squares of relative errors, so that short steps count too. No numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Row = tuple[float, float, float, float]
"""(x0, x1, x2, y) of y = a0·x0 + a1·x1 + a2·x2"""


class NotEnoughRowsError(ValueError):
    """The rows do not determine the coefficients."""


def fit(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Return the coefficients ≥ 0 with the smallest sum of squared relative errors. Raises NotEnoughRowsError."""
    if len(rows) < 3 or any(row[3] <= 0 for row in rows):
        raise NotEnoughRowsError(f"{len(rows)} rows; at least 3 with times above 0 are needed")
    scaled = [tuple(value / row[3] for value in row[:3]) for row in rows]
    best: tuple[float, tuple[float, float, float]] | None = None
    # At most three coefficients: the best of all choices of which are above zero is the non-negative optimum.
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            solution = _solve([[row[i] for i in chosen] for row in scaled])
            if solution is None or min(solution) < 0:
                continue
            every = [0.0, 0.0, 0.0]
            for index, value in zip(chosen, solution, strict=True):
                every[index] = value
            error = sum((sum(a * x for a, x in zip(every, row, strict=True)) - 1.0) ** 2 for row in scaled)
            if best is None or error < best[0]:
                best = (error, (every[0], every[1], every[2]))
    if best is None:
        raise NotEnoughRowsError("the rows are all of one kind")
    return best[1]


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Solve least squares of rows·a = 1 by the normal equations; None if they have no single solution."""
    size = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)] for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(matrix[i][column]))
        scale = max(abs(value) for value in matrix[pivot]) or 1.0
        if abs(matrix[pivot][column]) <= 1e-12 * scale:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for other in range(size):
            if other != column:
                ratio = matrix[other][column] / matrix[column][column]
                matrix[other] = [a - ratio * b for a, b in zip(matrix[other], matrix[column], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
