"""The router's estimates of the links between two workers, and that its predictions of hits follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tandem.core.ids import Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVLayout
from tandem.core.lifecycle import RoleName
from tandem.core.link_speed import LinkSpeed
from tandem.router.routing.plan import Candidate, form, held_tokens
from tandem.router.workers.link_speeds import LinkSpeedView
from tandem.router.workers.proto_convert import ReportedLink, WorkerFacts, load_from_wire
from tandem.rpc.v1 import worker_pb2 as w

TCP = LinkSpeed(from_host="a", to_host="b", transport="tcp", peer="d0", bytes_per_s=1e9)
USED = ReportedLink(
    rank=0, peer=WorkerId("d0"), peer_rank=0, transport="grpc", from_host="a", to_host="b", bytes_per_s=5e7,
    latency_s=1e-4, achieved_bytes_per_s=0.0, stalls=0, reason="", unused=(),
)  # fmt: skip


@dataclass(frozen=True)
class End:
    facts: WorkerFacts | None
    used_links: Sequence[ReportedLink] = ()


def end(name: str, host: str, *links: ReportedLink, transports: tuple[str, ...] = ("tcp", "grpc")) -> End:
    profile = KVProfile(fingerprint="f", identity=(), layout=KVLayout(groups=()))
    facts = WorkerFacts(
        worker=WorkerId(name), incarnation=Incarnation(1), role=RoleName.PREFILL, address="", model="m",
        fingerprint="f", tp=1, block_tokens=16, kv_dtype="float32", max_model_len=100, vocab_size=100,
        num_blocks=(9,), token_kv_bytes=1, transports=transports, protocol=2, eos_token_ids=(), pid=1, rank_pids=(),
        profile=profile, host=host,
    )  # fmt: skip
    return End(facts, links)


def test_the_link_in_use_counts_before_what_the_hosts_could_do() -> None:
    view = LinkSpeedView()
    p0, d0 = end("p0", "a"), end("d0", "b")
    assert view.bytes_per_s(p0, d0) is None
    view.set_rows([TCP, replace(TCP, transport="shm", bytes_per_s=9e9), replace(TCP, transport="grpc", failure="no")])
    assert view.bytes_per_s(p0, d0) == 1e9  # neither end has shm
    assert view.bytes_per_s(d0, p0) is None
    assert view.bytes_per_s(end("p0", "a", USED), d0) == 5e7
    assert view.bytes_per_s(end("p0", "a", replace(USED, rank=1), replace(USED, bytes_per_s=0.0)), d0) == 1e9
    assert view.bytes_per_s(end("p0", "a", USED), end("d1", "b")) == 1e9  # that link goes to d0
    assert view.bytes_per_s(None, d0) is None
    assert view.bytes_per_s(End(None), d0) is None
    view.set_rows([])
    assert view.bytes_per_s(p0, d0) is None


def test_the_usual_link_is_in_the_middle_of_those_that_were_measured() -> None:
    view = LinkSpeedView()
    mixed, d1 = end("m0", "a"), end("d1", "c")
    senders, receivers = (
        [end("p0", "a", USED), end("p1", "b"), mixed, End(None)],
        [end("d0", "b"), d1, mixed, End(None)],
    )
    assert view.median(senders, []) == 0.0
    assert view.median(senders[1:], receivers) == 0.0
    assert view.median(senders, receivers) == 5e7, "p0 to d0"
    assert view.median([end("p0", "a", replace(USED, bytes_per_s=float("inf")))], receivers) == 0.0
    view.set_rows([TCP, replace(TCP, to_host="c", bytes_per_s=3e9), replace(TCP, from_host="b", failure="no")])
    assert view.median(senders, receivers) == 2e9, "and 3 GB/s of p0 to d1, 1 and 3 of m0; none to itself, none from b"


@pytest.mark.parametrize(("speed", "expected"), [(None, "exact"), (2e8, "exact"), (5e7, "codec int8")])
def test_plans_know_which_links_are_slow_enough_for_a_codec(speed: float | None, expected: str) -> None:
    profile = KVProfile(fingerprint="f", identity=(), layout=KVLayout(groups=()))
    sender = replace(profile, offers=("int8",), offers_below_bytes_per_s=125e6)
    fields: dict[str, Any] = {"incarnation": Incarnation(1)}
    prefill = Candidate(
        worker=WorkerId("p0"), role=RoleName.PREFILL, profile=sender, link_speed=lambda _: speed, **fields
    )
    decode = Candidate(
        worker=WorkerId("d0"), role=RoleName.DECODE, profile=profile, held_tokens=48, lossy_tokens={"int8": 16},
        **fields,
    )  # fmt: skip
    assert form(prefill, decode) == expected
    assert held_tokens(prefill, decode) == (48 if expected == "exact" else 16)


def test_links_of_a_load_report() -> None:
    report = w.LoadReport(
        links=[w.LinkReport(rank=1, peer="d0", transport="tcp", bytes_per_s=2.0, stalls=3, reason="r", unused=["u"])]
    )
    (link,) = load_from_wire(report, 0.0).links
    assert (link.rank, link.peer, link.transport, link.bytes_per_s, link.stalls) == (1, "d0", "tcp", 2.0, 3)
    assert (link.reason, link.unused) == ("r", ("u",))
