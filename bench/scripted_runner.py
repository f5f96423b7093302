"""A runner that computes and samples, and then takes given tokens: for figures of answers that a small model does not
write. Not a benchmark itself."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.request import TokenOutput
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import LayersStored, SampleRow, StepBatch

END = 2
"""The end token of SmolLM2's tokenizer."""


class ScriptedRunner(ModelRunner):
    """Computes and samples every step, and then takes the tokens of `scripts`, by the seed of a request.

    Without scripts it takes the sampled ones.
    """

    scripts: Sequence[Sequence[int]] = ()

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: LayersStored | None = None
    ) -> list[TokenOutput]:
        results = super().step(batch, rows, on_layers)
        for row, result in zip(rows, results, strict=True):
            if self.scripts:
                script = self.scripts[row.sampling.params.seed]
                result.token = script[row.index] if row.index < len(script) else END
        return results
