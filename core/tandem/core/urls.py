"""Hosts and ports as one text, and URLs in a form that is safe to show."""

from __future__ import annotations

from urllib.parse import urlsplit


def host_port(host: str, port: int | str) -> str:
    """`host:port`, in the form of URLs and gRPC: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def redacted(url: str, otherwise: str = "the given URL") -> str:
    """`url` without user, password and options; safe to log and to show. `otherwise` if it is no URL."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        host = f"{host}:{parts.port}" if parts.port else host
    except ValueError:
        return otherwise
    if not parts.scheme:
        return otherwise
    return f"{parts.scheme}://{host}{parts.path}"
