"""The life of a batch as pure functions: a record and a moment in, the next record out.

    validating ──► in_progress ──► finalizing ──► completed
        │              │ ├────────────────────────► expired
        ▼              ▼ ▼
      failed         cancelling ──► cancelled

Every change raises the version by one, which is what the store checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum

from tandem.core.batch import BatchRecord, BatchStatus, LineError
from tandem.core.errors import InvalidRequestError

WINDOW_S = 24 * 3600
"""The completion window, the one that there is."""
_RUNNING = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class BatchStep(Enum):
    """The owner's next step for a batch."""

    VALIDATE = "read the input"
    EXECUTE = "answer what is not answered yet"
    PUBLISH = "write the output and end it"
    NOTHING = "it is over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of a batch's journal."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def action(record: BatchRecord, now_s: float) -> BatchStep:
    """Return the next step. Past its window a batch is ended with the answers that it has."""
    if record.status.is_over:
        return BatchStep.NOTHING
    if record.status is BatchStatus.VALIDATING:
        return BatchStep.VALIDATE
    if record.status is BatchStatus.IN_PROGRESS and now_s < record.expires_s:
        return BatchStep.EXECUTE
    return BatchStep.PUBLISH


def validated(record: BatchRecord, now_s: float, total: int, model: str | None) -> BatchRecord:
    """Its input is fine: `total` requests, for `model` if that is the same in all."""
    _check(record, BatchStatus.VALIDATING)
    return _next(record, status=BatchStatus.IN_PROGRESS, in_progress_s=int(now_s), total=total, model=model)


def refused(record: BatchRecord, now_s: float, errors: Sequence[LineError]) -> BatchRecord:
    """Its input is wrong."""
    _check(record, BatchStatus.VALIDATING)
    return _next(record, status=BatchStatus.FAILED, failed_s=int(now_s), errors=tuple(errors))


def progressed(record: BatchRecord, tally: Tally) -> BatchRecord:
    """More requests are answered."""
    _check(record, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    return _counted(record, tally)


def all_answered(record: BatchRecord, now_s: float, tally: Tally) -> BatchRecord:
    """Every request is answered, its output is being written."""
    _check(record, BatchStatus.IN_PROGRESS)
    return replace(_counted(record, tally), status=BatchStatus.FINALIZING, finalizing_s=int(now_s))


def cancel_asked(record: BatchRecord, now_s: float) -> BatchRecord:
    """A client does not want it any more; InvalidRequestError when it is too late. The same record = asked before."""
    if record.status is BatchStatus.CANCELLING:
        return record
    if record.status not in _RUNNING:
        raise InvalidRequestError(
            f"the batch {record.id} cannot be cancelled", why=f"it is {record.status}", param="batch_id"
        )
    return _next(record, status=BatchStatus.CANCELLING, cancelling_s=int(now_s))


def broken(record: BatchRecord, now_s: float, error: LineError) -> BatchRecord:
    """It cannot go on: what it needs is gone."""
    if record.status.is_over:
        raise ValueError(f"batch {record.id} is {record.status}")
    return _next(record, status=BatchStatus.FAILED, failed_s=int(now_s), errors=(error,))


def left_over(record: BatchRecord) -> LineError:
    """The error line of a request of a batch that ends before it was answered."""
    if record.status is BatchStatus.CANCELLING:
        return LineError(code="batch_cancelled", message="The batch was cancelled before this request was answered.")
    return LineError(code="batch_expired", message="The batch expired before this request was answered.")


def published(
    record: BatchRecord, now_s: float, tally: Tally, output_file: str | None, error_file: str | None
) -> BatchRecord:
    """Its output is written: it is over. `tally.failed` counts the requests that were never answered, too."""
    _check(record, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
    record = replace(_counted(record, tally), output_file=output_file, error_file=error_file)
    moment_s = int(now_s)
    if record.status is BatchStatus.CANCELLING:
        return replace(record, status=BatchStatus.CANCELLED, cancelled_s=moment_s)
    if record.status is BatchStatus.IN_PROGRESS:
        return replace(record, status=BatchStatus.EXPIRED, expired_s=moment_s)
    return replace(record, status=BatchStatus.COMPLETED, completed_s=moment_s)


def _counted(record: BatchRecord, tally: Tally) -> BatchRecord:
    return _next(record, **asdict(tally))


def _next(record: BatchRecord, **changes: object) -> BatchRecord:
    return replace(record, version=record.version + 1, **changes)  # type: ignore[arg-type]


def _check(record: BatchRecord, *allowed: BatchStatus) -> None:
    if record.status not in allowed:
        raise ValueError(f"batch {record.id} is {record.status}")
