"""Which version of Tandem runs."""

from __future__ import annotations

from tandem.core.version import release


def version() -> str:
    """As the installed distribution says; "unknown" where it is not installed."""
    return release()
