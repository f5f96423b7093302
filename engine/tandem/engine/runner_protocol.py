"""Interface of the engine to the executor of its steps: the model runner, or arithmetic in tests and simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.core.kv_layout import KVLayout
from tandem.engine.sampling_types import Sampled, SampleRow
from tandem.engine.step_batch import StepBatch

LayersStored = Callable[[int, int], None]
"""on_layers(first, last): the step's KV of layers [first, last) is in the pool (on CUDA: queued on the stream)."""


class Begun(Protocol):
    """A step that the device computes."""

    def results(self) -> list[Sampled]:
        """Return or raise the result of `Runner.step`, once the device has it. Call it once."""


class Ahead(Protocol):
    """Begins decode steps one behind the other, each before the tokens of the one before it are known."""

    def begin(
        self, batch: StepBatch, rows: Sequence[SampleRow], before: Begun | None = None, chosen: Sequence[int] = ()
    ) -> Begun | None:
        """Begin a step, behind everything begun so far; None, with nothing begun, where that takes waiting.

        With `before` its inputs are that step's choices: token i for its row `chosen[i]`, instead of `batch.token_ids`.
        Block tables are read during the call only, but the step reads and writes their blocks until its results are
        there.
        """


class Runner(Protocol):
    """Executes steps on one tensor-parallel group. Called from the step loop's thread only.

    An exception from `step` or `copy_blocks` fails every request of that step; WorkerLostError ends the engine.
    """

    layout: KVLayout
    max_model_len: int

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each KV group's pool."""

    @property
    def ahead(self) -> Ahead | None:
        """Interface to begin steps without waiting for them; None where the runner cannot."""

    def step(self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: LayersStored | None = None) -> list[Sampled]:
        """Compute the batch and choose a token for every row; `row.row` indexes `batch.logit_rows`.

        Calls `on_layers(first, last)` as KV layers are written. The block tables in `batch` belong to the scheduler and
        are valid during the call only.
        """

    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) of a group before the next step; no target is a source."""
