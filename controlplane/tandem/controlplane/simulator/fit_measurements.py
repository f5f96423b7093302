"""Fits the calibration's coefficients to measured steps and moves. Pure: rows in, figures out.

A row is an object of numbers. Seconds of all four kinds are `s`:

    prefill_steps   tokens, context               a chunk of `tokens` behind `context` others, alone in its step
    decode_steps    batch, context                one token for each of `batch` sequences, `context` tokens long each
    mixed_steps     tokens, context, batch, batch_context     both in one step
    kv_moves        bytes                         from opening a transfer to the news that it is verified
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tandem.core.errors import ConfigError

PREFILL = ("prefill_step_s", "prefill_token_s", "prefill_context_s")
DECODE = ("decode_step_s", "decode_sequence_s", "decode_context_s")
Row = Mapping[str, Any]


class NotEnoughRowsError(ValueError):
    """The rows do not determine the coefficients."""


def fitted(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the coefficients in place of the rows that they are fitted to, by least squares of relative
    errors.

    `usual` are the coefficients given by neither values nor rows. Raises ConfigError if rows do not determine their
    coefficients, KeyError for a row that lacks a key, TypeError or ValueError for a value that is no number.
    """
    found = dict(values)
    for key, names, terms in (("prefill_steps", PREFILL, _chunk), ("decode_steps", DECODE, _decodes)):
        rows = found.pop(key, None)
        if rows is not None:
            found |= dict(zip(names, _solved(key, [(*terms(row), float(row["s"])) for row in rows]), strict=True))
    mixed, moves = found.pop("mixed_steps", None), found.pop("kv_moves", None)
    if mixed is not None:
        found["shared_step_s"] = _shared(mixed, [float(found.get(name, usual[name])) for name in (*PREFILL, *DECODE)])
    if moves is not None:
        found["link_bytes_per_s"] = Moves.fitted(moves).bytes_per_s
    return found


@dataclass(frozen=True, slots=True)
class Moves:
    """A move of n bytes takes `move_s` + n / `bytes_per_s`."""

    move_s: float
    bytes_per_s: float

    @classmethod
    def fitted(cls, rows: Sequence[Row]) -> Moves:
        """Fit to `kv_moves`. Raises as `measured.fitted` does."""
        move_s, byte_s, _ = _solved("kv_moves", [(1.0, float(row["bytes"]), 0.0, float(row["s"])) for row in rows])
        if not byte_s:
            raise ConfigError("kv_moves cannot be fitted", why="longer ones take no more time", todo="move more bytes")
        return cls(move_s, 1 / byte_s)

    def takes_s(self, size_bytes: float) -> float:
        return self.move_s + size_bytes / self.bytes_per_s


def _chunk(row: Row) -> tuple[float, float, float]:
    tokens = float(row["tokens"])
    return 1.0, tokens, tokens * (row["context"] + tokens / 2)


def _decodes(row: Row) -> tuple[float, float, float]:
    return 1.0, float(row["batch"]), float(row["batch"]) * row["context"]


def _shared(rows: Sequence[Row], coefficients: Sequence[float]) -> float:
    """Return the time that mixed steps save against the sum, by least squares of relative errors; 0 to both fixed
    parts."""
    weights = gains = 0.0
    for row in rows:
        took_s = float(row["s"])
        if not took_s > 0:
            raise ConfigError("mixed_steps cannot be fitted", why=f"a step took {took_s} s", todo="measure it again")
        terms = (*_chunk(row), *_decodes({"batch": row["batch"], "context": row["batch_context"]}))
        apart_s = sum(a * x for a, x in zip(coefficients, terms, strict=True))
        weights += 1 / took_s**2
        gains += (apart_s - took_s) / took_s**2
    most = coefficients[0] + coefficients[len(PREFILL)]
    return min(most, max(0.0, gains / weights)) if weights else 0.0


def _solved(what: str, rows: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    try:
        return fit(rows)
    except NotEnoughRowsError as error:
        raise ConfigError(f"{what} cannot be fitted", why=str(error), todo="measure more shapes") from error


def fit(rows: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """Return the three coefficients ≥ 0 of y = a0·x0 + a1·x1 + a2·x2, for rows (x0, x1, x2, y), with the smallest sum
    of squared relative errors, so that short steps count too. No numpy. Raises NotEnoughRowsError."""
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
