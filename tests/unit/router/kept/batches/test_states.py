"""The life of a batch: every legal way, every illegal one, the version as what orders them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.core.batch import BatchRecord, BatchStatus, LineError, batch_from_json, to_json
from tandem.core.errors import InvalidRequestError
from tandem.router.kept.batches import states
from tandem.router.kept.batches.states import Action, Tally

NEW = BatchRecord(
    id="batch_1", tenant="t", endpoint="/v1/completions", input_file="file-1", created_s=100, expires_s=100 + 86_400
)
SOME = Tally(completed=2, failed=1, input_tokens=30, cached_tokens=16, output_tokens=9)


def test_the_way_to_the_end() -> None:
    assert states.action(NEW, 101) is Action.VALIDATE
    running = states.validated(NEW, 101.9, 3, "m")
    assert (running.status, running.in_progress_s, running.total, running.model) == ("in_progress", 101, 3, "m")
    assert states.action(running, 102) is Action.EXECUTE
    further = states.progressed(running, Tally(completed=1))
    assert (further.completed, further.status) == (1, BatchStatus.IN_PROGRESS)
    ending = states.all_answered(further, 103, SOME)
    assert (ending.status, ending.finalizing_s) == (BatchStatus.FINALIZING, 103)
    assert states.action(ending, 103) is Action.PUBLISH
    done = states.published(ending, 104, SOME, "file-2", "file-3")
    assert (done.status, done.completed_s, done.ended_s) == (BatchStatus.COMPLETED, 104, 104)
    assert (done.completed, done.failed, done.output_file, done.error_file) == (2, 1, "file-2", "file-3")
    assert (done.input_tokens, done.cached_tokens, done.output_tokens) == (30, 16, 9)
    assert states.action(done, 10**9) is Action.NOTHING
    assert [r.version for r in (NEW, running, further, ending, done)] == [1, 2, 3, 4, 5]


def test_a_wrong_input_ends_it() -> None:
    errors = [LineError(code="invalid_json_line", message="No.", line=7)]
    failed = states.refused(NEW, 105, errors)
    assert (failed.status, failed.failed_s, failed.errors) == (BatchStatus.FAILED, 105, tuple(errors))
    assert batch_from_json(to_json(failed)) == failed


def test_past_its_window_it_ends_with_what_it_has() -> None:
    running = states.validated(NEW, 101, 3, None)
    assert states.action(running, NEW.expires_s - 0.1) is Action.EXECUTE
    assert states.action(running, NEW.expires_s) is Action.PUBLISH
    assert states.left_over(running).code == "batch_expired"
    assert states.published(running, NEW.expires_s, SOME, None, None).status is BatchStatus.EXPIRED
    ending = states.all_answered(running, NEW.expires_s - 1, SOME)
    assert states.published(ending, NEW.expires_s + 9, SOME, None, None).status is BatchStatus.COMPLETED


@pytest.mark.parametrize("is_read", [False, True])
def test_cancelled_before_or_while_it_runs(is_read: bool) -> None:
    record = states.validated(NEW, 101, 3, None) if is_read else NEW
    asked = states.cancel_asked(record, 106)
    assert (asked.status, asked.cancelling_s, asked.version) == (BatchStatus.CANCELLING, 106, record.version + 1)
    assert states.cancel_asked(asked, 107) is asked
    assert states.action(asked, 107) is Action.PUBLISH
    assert states.left_over(asked).code == "batch_cancelled"
    over = states.published(asked, 108, Tally(completed=1, failed=2), "file-2", "file-3")
    assert (over.status, over.cancelled_s, over.completed) == (BatchStatus.CANCELLED, 108, 1)


def test_too_late_to_cancel() -> None:
    ending = states.all_answered(states.validated(NEW, 101, 3, None), 102, SOME)
    for record in (ending, states.published(ending, 103, SOME, None, None), states.refused(NEW, 101, [])):
        with pytest.raises(InvalidRequestError, match="cannot be cancelled"):
            states.cancel_asked(record, 110)


def test_nothing_happens_out_of_order() -> None:
    running = states.validated(NEW, 101, 3, None)
    done = states.published(states.all_answered(running, 102, SOME), 103, SOME, None, None)
    gone = LineError(code="gone", message="Gone.")
    assert states.broken(running, 104, gone).errors == (gone,)
    wrongs: tuple[Callable[[], BatchRecord], ...] = (
        lambda: states.validated(running, 102, 3, None),
        lambda: states.refused(running, 102, []),
        lambda: states.progressed(NEW, SOME),
        lambda: states.all_answered(NEW, 102, SOME),
        lambda: states.published(NEW, 102, SOME, None, None),
        lambda: states.published(done, 104, SOME, None, None),
        lambda: states.broken(done, 104, gone),
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="batch_1 is"):
            wrong()


def test_records_that_cannot_be_read() -> None:
    for text in ("[]", "{}", '{"status": "no"}', to_json(NEW).replace('"validating"', '"no"')):
        with pytest.raises(ValueError, match=r"."):
            batch_from_json(text)
    assert batch_from_json(to_json(NEW).replace("{", '{"later": 1, ', 1)) == NEW
