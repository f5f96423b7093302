"""The running version of Tandem."""

from __future__ import annotations

from tandem.core.version import release


def version() -> str:
    """Return the installed distribution's version; "unknown" where it is not installed."""
    return release()
