"""The life of a batch: every legal way, every illegal one, the version as what orders them."""

from collections.abc import Callable

import pytest

from tandem.core.batch import BatchRecord, BatchStatus, LineError, batch_from_json, to_json
from tandem.core.errors import InvalidRequestError
from tandem.router.storage.batches import state_machine
from tandem.router.storage.batches.state_machine import BatchStep, Tally

NEW = BatchRecord(
    id="batch_1", tenant="t", endpoint="/v1/completions", input_file="file-1", created_s=100, expires_s=100 + 86_400
)
SOME = Tally(completed=2, failed=1, input_tokens=30, cached_tokens=16, output_tokens=9)


def test_the_way_to_the_end() -> None:
    assert state_machine.action(NEW, 101) is BatchStep.VALIDATE
    running = state_machine.validated(NEW, 101.9, 3, "m")
    assert (running.status, running.in_progress_s, running.total, running.model) == ("in_progress", 101, 3, "m")
    assert state_machine.action(running, 102) is BatchStep.EXECUTE
    further = state_machine.progressed(running, Tally(completed=1))
    assert (further.completed, further.status) == (1, BatchStatus.IN_PROGRESS)
    ending = state_machine.all_answered(further, 103, SOME)
    assert (ending.status, ending.finalizing_s) == (BatchStatus.FINALIZING, 103)
    assert state_machine.action(ending, 103) is BatchStep.PUBLISH
    done = state_machine.published(ending, 104, SOME, "file-2", "file-3")
    assert (done.status, done.completed_s, done.ended_s) == (BatchStatus.COMPLETED, 104, 104)
    assert (done.completed, done.failed, done.output_file, done.error_file) == (2, 1, "file-2", "file-3")
    assert (done.input_tokens, done.cached_tokens, done.output_tokens) == (30, 16, 9)
    assert state_machine.action(done, 10**9) is BatchStep.NOTHING
    assert [r.version for r in (NEW, running, further, ending, done)] == [1, 2, 3, 4, 5]


def test_a_wrong_input_ends_it() -> None:
    errors = [LineError(code="invalid_json_line", message="No.", line=7)]
    failed = state_machine.refused(NEW, 105, errors)
    assert (failed.status, failed.failed_s, failed.errors) == (BatchStatus.FAILED, 105, tuple(errors))
    assert batch_from_json(to_json(failed)) == failed


def test_past_its_window_it_ends_with_what_it_has() -> None:
    running = state_machine.validated(NEW, 101, 3, None)
    assert state_machine.action(running, NEW.expires_s - 0.1) is BatchStep.EXECUTE
    assert state_machine.action(running, NEW.expires_s) is BatchStep.PUBLISH
    assert state_machine.left_over(running).code == "batch_expired"
    assert state_machine.published(running, NEW.expires_s, SOME, None, None).status is BatchStatus.EXPIRED
    ending = state_machine.all_answered(running, NEW.expires_s - 1, SOME)
    assert state_machine.published(ending, NEW.expires_s + 9, SOME, None, None).status is BatchStatus.COMPLETED


@pytest.mark.parametrize("is_read", [False, True])
def test_cancelled_before_or_while_it_runs(is_read: bool) -> None:
    record = state_machine.validated(NEW, 101, 3, None) if is_read else NEW
    asked = state_machine.cancel_asked(record, 106)
    assert (asked.status, asked.cancelling_s, asked.version) == (BatchStatus.CANCELLING, 106, record.version + 1)
    assert state_machine.cancel_asked(asked, 107) is asked
    assert state_machine.action(asked, 107) is BatchStep.PUBLISH
    assert state_machine.left_over(asked).code == "batch_cancelled"
    over = state_machine.published(asked, 108, Tally(completed=1, failed=2), "file-2", "file-3")
    assert (over.status, over.cancelled_s, over.completed) == (BatchStatus.CANCELLED, 108, 1)


def test_too_late_to_cancel() -> None:
    ending = state_machine.all_answered(state_machine.validated(NEW, 101, 3, None), 102, SOME)
    for record in (ending, state_machine.published(ending, 103, SOME, None, None), state_machine.refused(NEW, 101, [])):
        with pytest.raises(InvalidRequestError, match="cannot be cancelled"):
            state_machine.cancel_asked(record, 110)


def test_nothing_happens_out_of_order() -> None:
    running = state_machine.validated(NEW, 101, 3, None)
    done = state_machine.published(state_machine.all_answered(running, 102, SOME), 103, SOME, None, None)
    gone = LineError(code="gone", message="Gone.")
    assert state_machine.broken(running, 104, gone).errors == (gone,)
    wrongs: tuple[Callable[[], BatchRecord], ...] = (
        lambda: state_machine.validated(running, 102, 3, None),
        lambda: state_machine.refused(running, 102, []),
        lambda: state_machine.progressed(NEW, SOME),
        lambda: state_machine.all_answered(NEW, 102, SOME),
        lambda: state_machine.published(NEW, 102, SOME, None, None),
        lambda: state_machine.published(done, 104, SOME, None, None),
        lambda: state_machine.broken(done, 104, gone),
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="batch_1 is"):
            wrong()


def test_records_that_cannot_be_read() -> None:
    for text in ("[]", "{}", '{"status": "no"}', to_json(NEW).replace('"validating"', '"no"')):
        with pytest.raises(ValueError, match=r"."):
            batch_from_json(text)
    assert batch_from_json(to_json(NEW).replace("{", '{"later": 1, ', 1)) == NEW
