"""Hosts and ports as one text."""

from __future__ import annotations


def host_port(host: str, port: int | str) -> str:
    """`host:port`, in the form of URLs and gRPC: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
