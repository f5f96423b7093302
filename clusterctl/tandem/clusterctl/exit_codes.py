"""Exit codes of `clusterctl`, and the error that each stands for. docs/clusterctl.md has the same table."""

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
    """Exit codes that scripts may rely on."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """Wrong flags or settings, or a start that cannot be done with them."""
    NOT_FOUND = 3
    AUTH = 4
    CONFLICT = 5
    """It was changed concurrently, or a precondition does not hold."""
    TIMEOUT = 6
    """The wait timed out; the work may still go on."""
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
    """Return the exit code of a command that raised this error."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), Exit.FAILED)
