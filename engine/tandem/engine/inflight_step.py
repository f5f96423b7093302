"""A step that the device computes while the host has gone on: its plan and its results."""

from __future__ import annotations

from tandem.engine.runner_protocol import Begun
from tandem.engine.sampling_types import Sampled
from tandem.engine.scheduler import StepItem, StepPlan
from tandem.engine.sequence import QueueState
from tandem.engine.step_batch import StepBatch


class BegunStep:
    """`begun` is None where the step could not begin, because of `error`. `since_s`: when the step before it ended."""

    def __init__(self, plan: StepPlan, batch: StepBatch, begun: Begun | None, error: Exception | None = None) -> None:
        plan.logit_rows = len(batch.logit_rows)
        self.plan, self.batch, self.begun = plan, batch, begun
        self.since_s = 0.0
        self._error = error
        self._results: list[Sampled] | None = None

    def wait(self) -> None:
        """Wait until the device is done with it; an exception is raised by `results`."""
        if self._results is not None or self._error is not None or self.begun is None:
            return
        try:
            self._results = self.begun.results()
        except Exception as error:  # noqa: BLE001 - raised by `results`
            self._error = error

    def results(self) -> list[Sampled]:
        """One for every row of its batch. Raises what computing it raised."""
        self.wait()
        if self._results is None:
            raise self._error or AssertionError("a step that has not begun")
        return self._results


def is_stale(item: StepItem) -> bool:
    """True if the sequence ended, or lost its request or KV, after planning: its result is to be discarded."""
    sequence = item.sequence
    return item.state.place is QueueState.GONE or sequence.finish is not None or sequence.computed != item.start
