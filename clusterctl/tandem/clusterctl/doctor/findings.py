"""Findings of checks, and how checks are run: each by itself, so that one that breaks hides no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class SkipError(Exception):
    """A check cannot be made; the message contains the reason."""


class CheckResult(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works now, but may fail later, or is slower than it could be."""
    ERROR = "error"
    """Something does not work, or is not safe."""
    SKIPPED = "skipped"
    """It could not be checked, or there is nothing to check."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check, whose name `run` fills in. `fix`: what to do, "" where there is nothing to do."""

    check: str
    verdict: CheckResult
    what: str
    fix: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(what: str) -> Finding:
    return Finding("", CheckResult.OK, what)


def warning(what: str, fix: str) -> Finding:
    return Finding("", CheckResult.WARNING, what, fix)


def error(what: str, fix: str) -> Finding:
    return Finding("", CheckResult.ERROR, what, fix)


def skipped(what: str) -> Finding:
    return Finding("", CheckResult.SKIPPED, what)


def run(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield every finding of every check; a check that fails itself becomes an error with the reason."""
    for name, check in checks:
        try:
            for finding in check():
                yield replace(finding, check=name)
        except SkipError as reason:
            yield Finding(name, CheckResult.SKIPPED, str(reason))
        except Exception as failure:  # noqa: BLE001 - the others are still to be reported
            why = " ".join(str(failure).split()) or type(failure).__name__
            yield Finding(name, CheckResult.ERROR, f"the check failed: {why}", "correct that first")


def size(count: int) -> str:
    """Format a size in bytes: "64 MiB", "1.0 GiB"."""
    return f"{count / 2**20:,.0f} MiB" if count < 1 << 30 else f"{count / 2**30:,.1f} GiB"
