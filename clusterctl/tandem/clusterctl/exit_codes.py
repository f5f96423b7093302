"""With which code `clusterctl` ends, and which error means which. docs/clusterctl.md has the same table for people."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from tandem.core.errors import (
    AuthError,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    StartupError,
    TandemError,
    UnknownModelError,
)


class Exit(IntEnum):
    """What scripts may rely on."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """Wrong flags or settings, or what they ask for cannot be started."""
    NOT_FOUND = 3
    AUTH = 4
    CONFLICT = 5
    """Somebody else changed it first, or what was required beforehand does not hold."""
    TIMEOUT = 6
    """The wait is over and the work is not; it may still go on."""
    UNHEALTHY = 7
    SLO_MISSED = 8
    INTERRUPTED = 130


_BY_ERROR: Final[tuple[tuple[type[TandemError], Exit], ...]] = (
    (UnknownModelError, Exit.NOT_FOUND),
    (NotFoundError, Exit.NOT_FOUND),
    (InvalidRequestError, Exit.USAGE),
    (StartupError, Exit.USAGE),
    (AuthError, Exit.AUTH),
    (PermissionDeniedError, Exit.AUTH),
    (ConflictError, Exit.CONFLICT),
    (DeadlineError, Exit.TIMEOUT),
)
"""The first that an error is an instance of; all others are FAILED."""


def code_of(error: TandemError) -> Exit:
    """With which code a command ends that raised this."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), Exit.FAILED)
