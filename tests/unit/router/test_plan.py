"""Who serves a request."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.config import Disaggregation
from tandem.core.errors import UnavailableError
from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.kvlayout import KVGroupSpec, KVLayout
from tandem.core.lifecycle import RoleName
from tandem.core.pairing import ALWAYS_BYTES_PER_S, KVProfile
from tandem.router.plan import Candidate, Job, LeastWork, Plan, form, pairs, refusal


def worker(name: str, role: RoleName, **more: Any) -> Candidate:
    return Candidate(worker=WorkerId(name), incarnation=Incarnation(1), role=role, **more)


def p(name: str = "p0", **more: Any) -> Candidate:
    return worker(name, RoleName.PREFILL, **more)


def d(name: str = "d0", **more: Any) -> Candidate:
    return worker(name, RoleName.DECODE, **more)


def m(name: str = "m0", **more: Any) -> Candidate:
    return worker(name, RoleName.MIXED, **more)


def profile(fingerprint: str = "abc", transports: tuple[str, ...] = ("shm",)) -> KVProfile:
    identity = (("model", "m"), ("revision", fingerprint))
    return KVProfile(fingerprint=fingerprint, identity=identity, layout=KVLayout(groups=()), transports=transports)


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


def of_kv(dtype: str, block_tokens: int = 16, **more: Any) -> KVProfile:
    spec = KVGroupSpec(
        group=GroupId(0), layers=(0,), planes=2, heads=2, width=8, block_tokens=block_tokens, dtype=dtype
    )  # fmt: skip
    return KVProfile(fingerprint="abc", identity=(), layout=KVLayout(groups=(spec,)), **more)


def test_exact_hits_of_a_decode_worker_do_not_count_where_blocks_change_on_their_way() -> None:
    sender = p(profile=of_kv("float32"))
    held: dict[str, Any] = {"held_tokens": 64, "lossy_tokens": {"float32>bfloat16": 16}}
    assert plan(Disaggregation.AUTO, sender, d(profile=of_kv("float32", 8), **held)).decode_hit_tokens == 64
    assert plan(Disaggregation.AUTO, sender, d(profile=of_kv("bfloat16"), **held)).decode_hit_tokens == 16
    assert plan(Disaggregation.AUTO, sender, d(profile=of_kv("float16"), **held)).decode_hit_tokens == 0
    # The decode worker with the most that can be used is chosen, not the one with the most.
    able = (d("d0", profile=of_kv("bfloat16"), **held), d("d1", profile=of_kv("float32"), held_tokens=32))
    assert plan(Disaggregation.AUTO, sender, *able).decode == "d1"


def test_a_codec_that_is_always_on_changes_blocks_too() -> None:
    always: dict[str, Any] = {"offers": ("int8",), "offers_below_bytes_per_s": ALWAYS_BYTES_PER_S}
    receiver = d(profile=of_kv("float32"), held_tokens=64, lossy_tokens={"int8": 48})
    sender = p(profile=of_kv("float32", **always))
    assert plan(Disaggregation.AUTO, sender, receiver).decode_hit_tokens == 48
    assert form(sender, receiver) == "codec int8"
    measured = p(profile=of_kv("float32", offers=("int8",), offers_below_bytes_per_s=125e6))
    assert plan(Disaggregation.AUTO, measured, receiver).decode_hit_tokens == 64
    assert form(measured, receiver) == "exact"


def test_what_is_missing_names_the_reasons_once() -> None:
    others = [d(f"d{i}", profile=profile(fingerprint="other")) for i in range(9)]
    with pytest.raises(UnavailableError) as refused:
        plan(Disaggregation.ALWAYS, p(profile=profile()), p("p1", profile=profile()), *others)
    assert refused.value.message.count("revision differs: abc and other") == 1
    assert "p0 and d0: revision differs" in refused.value.message


def test_incompatible_pairs() -> None:
    one = p(profile=profile(transports=("shm",)))
    other = d(profile=profile(fingerprint="other"))
    assert "revision differs: abc and other" in refusal(one, other)
    assert "no common transport" in refusal(one, d(profile=profile(transports=("grpc",))))
    assert "did not say" in refusal(one, d())
    fits = d("d1", profile=profile(transports=("grpc", "shm")))
    assert pairs([one, other, fits]) == [(one, fits)]
    with pytest.raises(UnavailableError, match="fit together"):
        plan(Disaggregation.AUTO, one, other)
