"""Selects the splits to examine: all of a small cluster; of a large one those near by, and ever wider steps away."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.controlplane.planner.records import RoleSplit
from tandem.core.state_enums import RoleName

ALL_UP_TO = 16
"""Workers, up to which every split, and every total, is examined."""


def of_total(total: int, near: RoleSplit, *, is_mixed_allowed: bool = False) -> list[RoleSplit]:
    """Return splits of `total` workers near `near` that can serve, by their number of prefill workers.

    Mixed workers stay as they are, unless all are mixed or, with `is_mixed_allowed`, might be: then all mixed, and
    none, are considered too. The split `near` itself is among them if it has so many workers.
    """
    found = set(_pairs(total - near.mixed, near)) if near.prefill and near.decode else set()
    splits = {RoleSplit(p, total - near.mixed - p, near.mixed) for p in found}
    if is_mixed_allowed or near.mixed == near.total:
        splits.add(RoleSplit(0, 0, total))
    if is_mixed_allowed and total >= 2:
        splits |= {RoleSplit(p, total - p) for p in _pairs(total, near)}
    if near.total == total:
        splits.add(near)
    able = {split for split in splits if split.can_serve and split.total == total}
    if not able:  # the mixed ones do not leave room for anything beside them
        able = {RoleSplit(0, 0, total)} if near.mixed else {RoleSplit(p, total - p) for p in _pairs(total, near)}
    return sorted(able)


def towards(current: RoleSplit, wanted: RoleSplit, most: int) -> RoleSplit:
    """Return `current` with at most `most` workers flipped, on the way to `wanted`, which has as many workers. Those
    that stay as they are can serve meanwhile: fewer flip where they could not, perhaps none."""
    counts = {role: current.of(role) for role in RoleName}
    reached = current
    for _ in range(most):
        before = max(RoleName, key=lambda role: counts[role] - wanted.of(role))
        after = min(RoleName, key=lambda role: counts[role] - wanted.of(role))
        if counts[before] <= wanted.of(before):
            break
        counts[before] -= 1
        counts[after] += 1
        staying = RoleSplit(*(min(counts[role], current.of(role)) for role in RoleName))
        if not staying.can_serve:
            break
        reached = RoleSplit(*(counts[role] for role in RoleName))
    return reached


def shrunk(current: RoleSplit, total: int) -> list[RoleSplit]:
    """Return splits of `total` workers that can serve and for which workers only leave."""
    found = (
        RoleSplit(prefill, decode, total - prefill - decode)
        for prefill in range(current.prefill + 1)
        for decode in range(current.decode + 1)
    )
    return [split for split in found if split.can_serve and split.mixed <= current.mixed]


def totals(current: int, most: int) -> list[int]:
    """Return totals above `current` to examine, `most` the last: ever wider steps above ALL_UP_TO."""
    small = range(current + 1, min(most, ALL_UP_TO) + 1)
    return sorted({*small, *(current + step for step in _steps(most - current)), *((most,) if most > current else ())})


def grown(current: RoleSplit, total: int) -> list[RoleSplit]:
    """Return splits of `total` workers for which workers are only added, of the roles that there are. If many are: in
    the same shares as now, ever wider steps away from that, and all to one role."""
    more = total - current.total
    if current.mixed and not (current.prefill and current.decode):
        return [RoleSplit(current.prefill, current.decode, current.mixed + more)]
    if total <= ALL_UP_TO:
        found = set(range(more + 1))
    else:
        middle = round(more * current.prefill / max(1, current.prefill + current.decode))
        near = (middle + sign * step for step in _steps(more) for sign in (-1, 1))
        found = {0, middle, more} | {n for n in near if 0 < n < more}
    return [RoleSplit(current.prefill + n, current.decode + more - n, current.mixed) for n in sorted(found)]


def _pairs(total: int, near: RoleSplit) -> Iterator[int]:
    """Yield prefill workers of splits of `total` workers that are all prefill or decode."""
    if total <= ALL_UP_TO:
        yield from range(1, total)
        return
    middle = round(total * near.prefill / max(1, near.prefill + near.decode))
    for step in _steps(total):
        yield from (p for p in (middle - step, middle, middle + step) if 0 < p < total)


def _steps(below: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 8, 16 and so on."""
    step = 1
    while step < below:
        yield step
        step = step + 1 if step < 4 else step * 2
