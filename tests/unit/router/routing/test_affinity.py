"""Requests with one prompt_cache_key meet at the same workers, while those have not much more to do than others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tandem.core.config import Disaggregation
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lifecycle import RoleName
from tandem.router.routing.affinity import AFFINITY_REQUESTS, AFFINITY_TOKENS, with_affinity
from tandem.router.routing.plan import Candidate, Job, Plan
from tandem.router.routing.policies.cost import CostPolicy

ROLES = (RoleName.PREFILL, RoleName.DECODE)


def workers(role: RoleName, count: int, **of: dict[str, Any]) -> list[Candidate]:
    names = [f"{role.value}-{number}" for number in range(count)]
    return [
        Candidate(worker=WorkerId(n), incarnation=Incarnation(1), role=role, last_used=number, **of.get(n, {}))
        for number, n in enumerate(names)
    ]


def plan(key: str, **of: dict[str, Any]) -> Plan:
    able = with_affinity(key, [candidate for role in ROLES for candidate in workers(role, 4, **of)])
    job = Job(prompt_tokens=100, max_tokens=10, is_kept_together=bool(key))
    return CostPolicy(Disaggregation.ALWAYS).plan(job, able)


def homes(key: str, candidates: list[Candidate]) -> set[WorkerId]:
    seen = with_affinity(key, candidates)
    return {after.worker for before, after in zip(candidates, seen, strict=True) if after == before}


def test_one_key_one_pair_and_keys_spread() -> None:
    for key in ("a", "b", "c"):
        home = plan(key).workers
        # Independent of the worker used last, and of slightly lower load elsewhere.
        busy = {worker: {"queued_tokens": AFFINITY_TOKENS - 1, "in_flight": AFFINITY_REQUESTS - 1} for worker in home}
        assert plan(key, **busy).workers == home
    counts = Counter(plan(str(number)).workers for number in range(400))
    assert len(counts) == 16
    assert max(counts.values()) < 3 * 400 / 16
    assert plan("").workers == ("prefill-0", "decode-0")


def test_load_comes_first() -> None:
    prefill, decode = plan("a").workers
    assert plan("a", **{prefill: {"queued_tokens": AFFINITY_TOKENS + 1}}).prefill != prefill
    elsewhere = plan("a", **{decode: {"in_flight": AFFINITY_REQUESTS + 1}})
    assert elsewhere.prefill == prefill
    assert elsewhere.decode != decode


@pytest.mark.parametrize("gone", range(4))
def test_a_worker_that_leaves_moves_only_its_own_keys(gone: int) -> None:
    every = workers(RoleName.MIXED, 4)
    left = [candidate for number, candidate in enumerate(every) if number != gone]
    moved = 0
    for number in range(200):
        before, after = homes(str(number), every), homes(str(number), left)
        assert len(before) == len(after) == 1
        if before != after:
            moved += 1
            assert before == {every[gone].worker}
    assert 0 < moved < 100
