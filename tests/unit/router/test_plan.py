"""Who serves a request."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.config import Disaggregation
from tandem.core.errors import UnavailableError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lifecycle import RoleName
from tandem.router.plan import Candidate, Job, LeastWork, Plan, pairs, refusal


def worker(name: str, role: RoleName, **more: Any) -> Candidate:
    return Candidate(worker=WorkerId(name), incarnation=Incarnation(1), role=role, **more)


def p(name: str = "p0", **more: Any) -> Candidate:
    return worker(name, RoleName.PREFILL, **more)


def d(name: str = "d0", **more: Any) -> Candidate:
    return worker(name, RoleName.DECODE, **more)


def m(name: str = "m0", **more: Any) -> Candidate:
    return worker(name, RoleName.MIXED, **more)


def plan(mode: Disaggregation, *candidates: Candidate, prompt_tokens: int = 100, max_tokens: int = 10) -> Plan:
    return LeastWork(mode).plan(Job(prompt_tokens=prompt_tokens, max_tokens=max_tokens), candidates)


@pytest.mark.parametrize("mode", [Disaggregation.AUTO, Disaggregation.ALWAYS])
def test_a_pair_where_there_is_one(mode: Disaggregation) -> None:
    chosen = plan(mode, p(), d(held_tokens=32))
    assert chosen.workers == ("p0", "d0")
    assert (chosen.prefill_hit_tokens, chosen.decode_hit_tokens) == (0, 32)


def test_modes_without_a_pair() -> None:
    assert plan(Disaggregation.AUTO, m()).workers == ("m0",)
    assert plan(Disaggregation.NEVER, p(), d()).workers == ("d0",)
    assert plan(Disaggregation.NEVER, p(), d(), m()).workers == ("m0",)
    with pytest.raises(UnavailableError, match="no prefill and no decode worker"):
        plan(Disaggregation.ALWAYS, m())
    with pytest.raises(UnavailableError, match="no decode worker"):
        plan(Disaggregation.AUTO, p())
    with pytest.raises(UnavailableError, match="no mixed or decode"):
        plan(Disaggregation.NEVER, p())


def test_one_token_needs_no_decode_worker() -> None:
    assert plan(Disaggregation.ALWAYS, p(), d(), max_tokens=1).workers == ("p0",)
    assert plan(Disaggregation.AUTO, p(queued_tokens=9), d(), m(), max_tokens=1).workers == ("m0",)
    assert plan(Disaggregation.NEVER, p(), d(), max_tokens=1).workers == ("d0",)


def test_least_work_decides() -> None:
    assert plan(Disaggregation.AUTO, p("p0", queued_tokens=500), p("p1", queued_tokens=20), d()).prefill == "p1"
    assert plan(Disaggregation.AUTO, p(), d("d0", in_flight=4), d("d1", in_flight=3)).decode == "d1"
    assert plan(Disaggregation.AUTO, p(queued_tokens=500), d(), m()).workers == ("m0",)
    assert plan(Disaggregation.ALWAYS, p(queued_tokens=500), d(), m()).workers == ("p0", "d0")


def test_hits_count_as_work_saved_but_do_not_outweigh_a_queue() -> None:
    assert plan(Disaggregation.AUTO, p("p0"), p("p1", reusable_tokens=96), d()).prefill == "p1"
    busy = p("p1", reusable_tokens=96, queued_tokens=97)
    assert plan(Disaggregation.AUTO, p("p0"), busy, d()).prefill == "p0"
    assert plan(Disaggregation.AUTO, p(), d("d0"), d("d1", held_tokens=16)).decode == "d1"


def test_equals_take_turns() -> None:
    assert plan(Disaggregation.AUTO, p("p0", last_used=9), p("p1", last_used=3), d()).prefill == "p1"


def test_incompatible_pairs() -> None:
    one = p(pairing=(("kv dtype", "bf16"),), transports=("shm",))
    assert "kv dtype differs: bf16 and fp32" in refusal(one, d(pairing=(("kv dtype", "fp32"),)))
    assert "no common transport" in refusal(one, d(pairing=one.pairing, transports=("grpc",)))
    fits = d("d1", pairing=one.pairing, transports=("grpc", "shm"))
    assert pairs([one, d(pairing=(("kv dtype", "fp32"),)), fits]) == [(one, fits)]
    with pytest.raises(UnavailableError, match="fit together"):
        plan(Disaggregation.AUTO, one, d(pairing=(("kv dtype", "fp32"),)))
