"""Hosts and ports as one text."""

from __future__ import annotations


def host_port(host: str, port: int | str) -> str:
    """`host:port`, as URLs and gRPC want it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
