"""Rank 0's runner in a tensor-parallel group: every step and copy goes to the followers first, then runs here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tandem.core.errors import WorkerLostError
from tandem.engine.runner_protocol import Ahead, Runner
from tandem.engine.sampling_types import Sampled, SampleRow
from tandem.engine.step_batch import StepBatch
from tandem.worker.commands import AFTER_STEP, CopyBlocks, Step
from tandem.worker.followers import Followers

_log = logging.getLogger(__name__)


class LeaderRunner:
    """A `Runner` over a whole group. Only this rank samples.

    A step that fails raises WorkerLostError: some ranks may be inside a collective that others have left, so no
    further step can be trusted, and the worker ends.
    """

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner, self._followers = runner, followers
        self.layout = runner.layout
        self.max_model_len = runner.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._runner.eos_token_ids

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return self._runner.num_blocks

    @property
    def ahead(self) -> Ahead | None:
        """None: followers get a step's tokens only with the next step."""
        return None

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: Callable[[int, int], None] | None = None
    ) -> list[Sampled]:
        followers = self._followers
        followers.broadcast(Step(batch, has_hook=on_layers is not None))

        def stored(first: int, last: int) -> None:
            followers.stored_layers = last
            if on_layers is not None:
                on_layers(first, last)

        followers.is_in_step, followers.stored_layers = True, 0
        try:
            return self._runner.step(batch, rows, stored if on_layers is not None else None)
        except WorkerLostError:
            raise
        except Exception as error:
            _log.exception("a step of the group failed")
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise WorkerLostError("a step of the tensor-parallel group failed on rank 0", why=what) from error
        finally:
            followers.is_in_step, followers.stored_layers = False, AFTER_STEP

    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        self._followers.broadcast(CopyBlocks(group, pairs))
        self._runner.copy_blocks(group, pairs)
