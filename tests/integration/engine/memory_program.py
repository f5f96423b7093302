"""Loads a model, runs the largest step that its plan allows, with the option `long` at the end of the longest context,
and prints what was planned and what that took."""

import json
import resource
import sys
from pathlib import Path

from tandem.core.sampling import SamplingParams
from tandem.engine.memory_plan import StepBounds
from tandem.engine.request import TokenOutput
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SampleRow, SeqSlice, StepBatch
from tandem.engine.sampling_state import ChoiceSampling

BOUNDS = StepBounds(tokens=512, sequences=64)
PROMPT = BOUNDS.tokens - BOUNDS.sequences


def main() -> None:
    options = sys.argv[2:]
    runner = ModelRunner(
        model_dir=Path(sys.argv[1]), num_blocks=2 * BOUNDS.tokens, bounds=BOUNDS,
        is_deterministic="deterministic" in options,
    )  # fmt: skip
    past = runner.max_model_len - PROMPT if "long" in options else 0
    assert len(_step(runner, 2, 2)) == 4  # code is mapped when it runs first
    before = _now_bytes()
    assert len(_step(runner, BOUNDS.sequences, PROMPT, past)) == BOUNDS.tokens
    took = _most_bytes() - before
    print(json.dumps({"planned": runner.memory.activations + runner.memory.sampler, "took": took}))


def _step(runner: ModelRunner, decodes: int, prompt: int, past: int = 0) -> list[TokenOutput]:
    """Run decodes in blocks of their own, and a prompt with logits of all its tokens, behind `past` tokens."""
    sequences = [SeqSlice(1, 1, ([block],)) for block in range(decodes)]
    blocks = range(decodes, decodes + max(prompt, -(-(past + prompt) // 16)))
    sequences.append(SeqSlice(prompt, past + prompt, (list(blocks),)))
    positions = [0] * decodes + list(range(past, past + prompt))
    tokens = [position % 100 for position in range(decodes + prompt)]
    batch = StepBatch(tokens, positions, sequences, list(range(decodes + prompt)))
    warm = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=1, logprobs=3, presence_penalty=0.5)
    scored = SamplingParams(max_tokens=9, prompt_logprobs=3)
    rows = [
        SampleRow(row, 0, ChoiceSampling(warm, 0, (5, 6), (), (1,)))
        if row < decodes
        else SampleRow(row, 0, ChoiceSampling(scored, 0, (5, 6), (), (1,)), 7)
        for row in range(decodes + prompt)
    ]
    return runner.step(batch, rows)


def _now_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _most_bytes() -> int:
    """Return the peak of this program alone: `getrusage` includes the process before it became this program."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (most,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(most) * 1024


if __name__ == "__main__":
    main()
