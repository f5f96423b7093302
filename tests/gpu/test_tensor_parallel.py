"""A model split over GPUs of this machine, one process each and NCCL between them, against one process on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.engine.tp_program import play

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "models" / "tandem-tiny"
PATIENCE_S = 240


def steps() -> list[dict[str, Any]]:
    """A prompt in two chunks, then decodes of it, in fp32: the last one is sampled."""
    tokens = torch.randint(0, 4096, (105,), generator=torch.Generator().manual_seed(2)).tolist()
    table = list(range(20, 10, -1))
    made = []
    for low, high in ((0, 60), (60, 100), (100, 101), (101, 102), (102, 103)):
        made.append({
            "tokens": tokens[low:high], "positions": list(range(low, high)), "rows": list(range(high - low)),
            "sequences": [{"query": high - low, "context": high, "table": table}], "is_sampled": low == 102,
        })  # fmt: skip
    return made


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_on_gpus_compute_what_one_process_on_the_cpu_does(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"NCCL wants a GPU a rank, and here are {torch.cuda.device_count()}")
    case: dict[str, Any] = {
        "folder": str(BUNDLED), "steps": steps(),
        "options": {"dtype": "float32", "num_blocks": 40, "max_model_len": 256},
    }  # fmt: skip
    alone = play(case)
    case["options_of_rank"] = {str(rank): {"device": f"cuda:{rank}"} for rank in range(size)}
    (tmp_path / "cases.json").write_text(json.dumps({"gpus": case}))
    program = [sys.executable, "-m", "tests.integration.engine.tp_program", str(tmp_path)]
    ranks = [
        subprocess.Popen([*program, str(rank), str(size), "cases on GPUs", "60", "120"], cwd=ROOT, env=os.environ)
        for rank in range(size)
    ]
    try:
        assert [process.wait(timeout=PATIENCE_S) for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=PATIENCE_S)
    found = [load_file(tmp_path / f"gpus-{rank}.safetensors") for rank in range(size)]
    for key, expected in alone.items():
        if key != "pool":
            torch.testing.assert_close(found[0][key], expected, atol=2e-3, rtol=0)
    heads = alone["pool"].shape[3]
    for rank, each in enumerate(found):
        first = rank * heads // size
        own = alone["pool"][11:21, :, :, first : first + max(1, heads // size)]
        torch.testing.assert_close(each["pool"][11:21], own, atol=2e-3, rtol=0)
