"""Release of Tandem that runs, and version of the stream between routers and workers (router_stream.proto)."""

from __future__ import annotations

from importlib import metadata

STREAM_VERSION = 4
"""A change that the other end must understand raises it; one that it may ignore does not. 3: several messages at once,
packed prompts. 4: states of workers, which a router acknowledges."""


def stream_refusal(theirs: int) -> str:
    """Why the stream's other end is incompatible; "" if it is not."""
    if theirs == STREAM_VERSION:
        return ""
    versions = f"version {theirs} there, {STREAM_VERSION} here"
    return f"routers and workers speak different versions of their stream: {versions}; update the older one"


def release() -> str:
    """The version of the installed distribution; "unknown" where it is not installed."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return "unknown"
