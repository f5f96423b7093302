"""Which pairs a router tries: all of a few, and so many of many that every worker has been in some."""

from __future__ import annotations

from collections import Counter

import pytest

from tandem.router.plan import Candidate
from tandem.router.readiness import PAIRS_EACH, enough, pair_plans
from tests.unit.router.candidates import d, p


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (3, 2), (4, 4), (1, 40), (40, 1)])
def test_few_pairs_are_all_tried(prefills: int, decodes: int) -> None:
    every = pair_plans(_workers(prefills, decodes))
    assert len(every) == prefills * decodes
    assert enough(every) == every


@pytest.mark.parametrize(("prefills", "decodes"), [(64, 64), (10, 90), (33, 7)])
def test_of_many_pairs_each_worker_is_in_some(prefills: int, decodes: int) -> None:
    every = pair_plans(_workers(prefills, decodes))
    tried = enough(every)
    counts = Counter(worker for plan in tried.values() for worker in plan.workers)
    assert len(counts) == prefills + decodes
    assert min(counts.values()) >= min(PAIRS_EACH, prefills, decodes)
    assert len(tried) <= PAIRS_EACH * (prefills + decodes)
    assert set(tried) <= set(every)


def _workers(prefills: int, decodes: int) -> list[Candidate]:
    return [*(p(f"p{number}") for number in range(prefills)), *(d(f"d{number}") for number in range(decodes))]
