"""Release of Tandem that runs."""

from __future__ import annotations

from importlib import metadata


def release() -> str:
    """The version of the installed distribution; "unknown" where it is not installed."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return "unknown"
