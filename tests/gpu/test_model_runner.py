"""The model runner on a GPU against itself on the CPU: the same logits and the same KV."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.runner import ModelRunner
from tandem.engine.step_batch import SeqSlice, StepBatch

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tandem-tiny"


def run(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Logits of a prompt in two chunks, then of three decode steps of two sequences that share its first blocks."""
    table, found = list(range(30, 0, -1)), []
    for low, high in ((0, 200), (200, 300)):
        rows = list(range(high - low))
        batch = StepBatch(tokens[low:high], list(range(low, high)), [SeqSlice(high - low, high, (table,))], rows)
        found.append(runner.forward(batch).cpu())
    other = [*table[:18], 40, 41]
    runner.copy_blocks(0, [(table[18], 40)])
    for place in range(300, 303):
        pair = [SeqSlice(1, place + 1, (table,)), SeqSlice(1, place + 1, (other,))]
        found.append(runner.forward(StepBatch([tokens[place], 7], [place] * 2, pair, [0, 1])).cpu())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        ("float32", "auto", 2e-3),
        ("bfloat16", "auto", 0.5),
        ("float32", "bfloat16", 0.1),
        ("bfloat16", "float32", 0.5),
        ("bfloat16", "float16", 0.5),
    ],
)
def test_the_gpu_agrees_with_the_cpu(dtype: str, kv_dtype: str, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 4096, (310,), generator=generator).tolist()
    runners = [
        ModelRunner(model_dir=BUNDLED, dtype=dtype, kv_dtype=kv_dtype, device=device, num_blocks=48, max_model_len=512)
        for device in ("cpu", "cuda")
    ]
    cpu, gpu = (run(runner, tokens) for runner in runners)
    torch.testing.assert_close(gpu, cpu, atol=tolerance, rtol=0)
    kv = [runner.pools.tensors[0][1:31].float().cpu() for runner in runners]
    torch.testing.assert_close(kv[1], kv[0], atol=tolerance, rtol=2e-2)
