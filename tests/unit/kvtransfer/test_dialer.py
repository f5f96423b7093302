"""The transports that a sender tries, and their order."""

from __future__ import annotations

import pytest

from tandem.core.ids import Rank
from tandem.kvtransfer.host_id import host_id, shares_clock
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.dialer import candidates
from tandem.kvtransfer.transports.registry import Preference

GRPC = Endpoint(rank=Rank(0), transport="grpc", host="a:1", address="127.0.0.1:1")
SHM = Endpoint(rank=Rank(0), transport="shm", host="a:1", address="/run/kv.sock")


@pytest.mark.parametrize(
    ("preference", "host", "expected"),
    [
        ("auto", "a:1", [("shm", "same host"), ("grpc", "same host")]),
        ("auto", "a:2", [("grpc", "another host")]),
        ("auto", "b:1", [("grpc", "another host")]),
        ("shm", "a:2", [("shm", "configured")]),
        ("grpc", "a:1", [("grpc", "configured")]),
    ],
)
def test_candidates(preference: Preference, host: str, expected: list[tuple[str, str]]) -> None:
    found = candidates((GRPC, SHM), host, preference)
    assert [(c.endpoint.transport, c.reason) for c in found] == expected


def test_one_machine_has_one_id_and_one_clock() -> None:
    assert host_id() == host_id()
    assert shares_clock(host_id(), host_id().partition(":")[0] + ":another container")
    assert not shares_clock(host_id(), "another boot:x")
