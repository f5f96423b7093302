"""`clusterctl net` for people: the matrix, what failed, the links in use and what is worth a warning."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from tandem.clusterctl.kv import net_view

A = "1c9f-boot.4026531834:4026531836.node-a"
B = "77aa-boot.4026531834:4026531836.node-b.example"
OTHER_A = "99ff-boot.4026531834:4026531836.node-a"


def row(from_host: str, to_host: str, transport: str, **more: Any) -> dict[str, Any]:
    fields = {"peer": "d0", "bytes_per_s": 0.0, "latency_s": 0.0, "age_s": 7.0, "failure": "", "is_used": False}
    return {"from_host": from_host, "to_host": to_host, "transport": transport} | fields | more


LINK: dict[str, Any] = {
    "worker": "p0", "rank": 1, "peer": "d0", "peer_rank": 0, "transport": "tcp", "from_host": A, "to_host": B,
    "bytes_per_s": 1.5e9, "latency_s": 9e-5, "achieved_bytes_per_s": 4e8, "stalls": 12,
    "reason": "another host; shm failed: refused", "unused": ["shm failed: refused"],
}  # fmt: skip


def shown(net: dict[str, Any]) -> str:
    text = io.StringIO()
    net_view.show(net, Console(file=text, width=200))
    return text.getvalue()


def test_matrix_links_and_warnings() -> None:
    page = shown({
        "measured": [
            row(A, B, "shm", failure="refused"),
            row(A, B, "tcp", bytes_per_s=1.5e9, latency_s=9e-5, is_used=True),
            row(B, A, "tcp", bytes_per_s=12.5e6, latency_s=2e-3, age_s=600.0),
        ],
        "links": [LINK],
    })  # fmt: skip
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert lines[0] == "FROM TO shm tcp"
    assert "node-a node-b.example failed 1.50 GB/s, 90 µs, 7 s ago *" in lines
    assert "node-b.example node-a – 12.5 MB/s, 2000 µs, 10 min ago" in lines
    assert "failed: shm from node-a to node-b.example, to d0, 7 s ago: refused" in lines
    assert "p0.1 → d0.0 tcp 1.50 GB/s 400 MB/s 12 another host; shm failed: refused" in lines
    assert "warning: p0.1 → d0.0 goes over tcp: shm failed: refused" in lines


def test_a_link_that_dials_and_a_success_beside_another_worker_s_failure() -> None:
    dialling = LINK | {"transport": "", "bytes_per_s": 0.0, "achieved_bytes_per_s": 0.0, "unused": [], "stalls": 0}
    measured = [row(A, B, "tcp", failure="refused", peer="d7"), row(A, B, "tcp", bytes_per_s=1e9)]
    page = shown({"measured": measured, "links": [dialling | {"reason": "dialling"}]})
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert "p0.1 → d0.0 dialling – – 0 dialling" in lines
    assert "node-a node-b.example 1.00 GB/s, 0 µs, 7 s ago" in lines


def test_nothing_yet() -> None:
    assert shown({"measured": [], "links": []}).startswith("no link was measured yet")


def test_machines_of_one_name_are_told_apart() -> None:
    names = net_view.short_names([A, B, OTHER_A, A, "", "odd"])
    assert (names[A], names[OTHER_A], names[B]) == ("node-a", "node-a#2", "node-b.example")
    assert (names[""], names["odd"]) == ("–", "odd")
