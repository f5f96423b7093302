"""What the engine asks of whatever executes its steps: the model runner, or arithmetic in tests and simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tandem.core.kvlayout import KVLayout
from tandem.engine.step_batch import StepBatch

if TYPE_CHECKING:
    import torch


class Runner(Protocol):
    """Executes steps on one tensor-parallel group. Called from the step loop's thread only.

    An exception from `forward` or `copy_blocks` fails every request of that step.
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

    def forward(self, batch: StepBatch, on_layers: Callable[[int, int], None] | None = None) -> torch.Tensor:
        """fp32 logits [len(batch.logit_rows), vocab_size]; calls `on_layers(first, last)` as KV layers are written.

        The block tables in `batch` belong to the scheduler and are valid during the call only.
        """

    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) of a group before the next forward; no target is a source."""
