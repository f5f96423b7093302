"""Hosts and ports as one text."""

from __future__ import annotations

from tandem.core.addresses import host_port


def test_only_ipv6_addresses_need_brackets() -> None:
    assert host_port("127.0.0.1", 8000) == "127.0.0.1:8000"
    assert host_port("node-1.example", 0) == "node-1.example:0"
    assert host_port("::1", 8000) == "[::1]:8000"
