"""Which release of Tandem runs."""

from __future__ import annotations

from importlib import metadata


def release() -> str:
    """As the installed distribution says; "unknown" where it is not installed."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return "unknown"
