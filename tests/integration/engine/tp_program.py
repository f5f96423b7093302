"""One rank in a process of its own: `python -m tests.integration.engine.tp_program FOLDER RANK SIZE MODE`.

FOLDER holds the rendezvous file and, for the mode `cases`, cases.json; what the rank computed goes back there.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.core.errors import TandemError
from tandem.core.ids import BlockId
from tandem.core.sampling import SamplingParams
from tandem.engine.parallel import TensorGroup, open_group
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SampleRow, SeqSlice, StepBatch
from tandem.engine.sampling_state import ChoiceSampling


def play(case: dict[str, Any], group: TensorGroup | None = None) -> dict[str, Tensor]:
    """Run the steps of a case: logits of each that wants some, the tokens that `step` chose, and the pool."""
    runner = ModelRunner(model_dir=Path(case["folder"]), group=group, **case["options"])
    found: dict[str, Tensor] = {}
    for number, step in enumerate(case["steps"]):
        for pair in step.get("copies", []):
            runner.copy_blocks(0, [(pair[0], pair[1])])
        batch = batch_of(step)
        if not step.get("is_sampled"):
            found[f"logits {number}"] = runner.forward(batch)
            continue
        greedy = ChoiceSampling(SamplingParams(max_tokens=1, temperature=0.0), 0, batch.token_ids)
        chosen = runner.step(batch, [SampleRow(row, 0, greedy) for row in range(len(batch.logit_rows))])
        found[f"tokens {number}"] = torch.tensor([each.token for each in chosen], dtype=torch.int64)
    found["pool"] = runner.pools.tensors[0]
    found["num_blocks"] = torch.tensor(runner.num_blocks)
    return found


def batch_of(step: dict[str, Any]) -> StepBatch:
    sequences = [
        SeqSlice(each["query"], each["context"], ([BlockId(block) for block in each["table"]],))
        for each in step["sequences"]
    ]
    return StepBatch(step["tokens"], step["positions"], sequences, step["rows"])


def run_cases(group: TensorGroup, folder: Path) -> None:
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        case["options"] |= case.get("options_of_rank", {}).get(str(group.rank), {})
        found = {key: value.clone().contiguous() for key, value in play(case, group).items()}
        save_file(found, folder / f"{name}-{group.rank}.safetensors")


def sum_forever(group: TensorGroup, folder: Path) -> None:
    """Sums until something breaks."""
    say("ready")
    while True:
        assert torch.equal(group.all_reduce_(torch.ones(300)), torch.full((300,), float(group.size)))


def sum_different_sizes(group: TensorGroup, folder: Path) -> None:
    """Ranks that were given different steps must not get a sum."""
    group.barrier()
    say("ready")
    group.all_reduce_(torch.ones(100 - group.rank))
    say("summed")


def fail_in_a_step(group: TensorGroup, folder: Path) -> None:
    """The last rank fails in the middle of a step, and lives on until its input ends."""
    case = json.loads((folder / "cases.json").read_text())["any"]
    runner = ModelRunner(model_dir=Path(case["folder"]), group=group, layer_group=1, **case["options"])
    batch = batch_of(case["steps"][0])
    runner.forward(batch)
    say("ready")

    def stored(first: int, last: int) -> None:
        if group.rank == group.size - 1 and last == 2:
            raise MemoryError("no room for a copy")

    try:
        runner.forward(batch, stored)
    except MemoryError as error:
        say(f"own failure: {error}")
        sys.stdin.read()
        raise


def sum_everything(group: TensorGroup, folder: Path) -> None:
    """Sums and gathers of every size and dtype against what they must be; then a default group beside this one."""
    for count in (0, 1, 7, 4096, 100_003):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            parts = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size)]
            parts = [part.to(dtype) for part in parts]
            summed = group.all_reduce_(parts[group.rank].clone())
            expected = parts[0].float()
            for part in parts[1:]:
                expected = expected + part.float()
            assert torch.equal(summed, expected.to(dtype)), (count, dtype)
    whole = torch.arange(3 * 5 * group.size, dtype=torch.float32).view(3, -1)
    gathered = group.gather_columns(whole[:, 5 * group.rank : 5 * group.rank + 5].contiguous())
    assert torch.equal(gathered, whole if group.rank == 0 else whole[:0])
    assert group.smallest((group.rank + 3, 9 - group.rank)) == (3, 10 - group.size)
    group.barrier()
    distributed: Any = torch.distributed
    assert not distributed.is_initialized()
    store = distributed.FileStore(str(folder / "another"), group.size)
    distributed.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    other = torch.ones(3)
    distributed.all_reduce(other)
    assert group.all_reduce_(torch.ones(3)).tolist() == other.tolist()
    distributed.destroy_process_group()


def say(text: str) -> None:
    print(text, flush=True)


MODES: dict[str, Callable[[TensorGroup, Path], None]] = {
    "cases": run_cases,
    "cases on GPUs": run_cases,
    "sums": sum_everything,
    "forever": sum_forever,
    "different": sum_different_sizes,
    "fail": fail_in_a_step,
}


def main(folder: Path, rank: int, size: int, mode: str, timeout_s: float, start_timeout_s: float) -> int:
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if mode == "cases on GPUs" else "cpu"
    try:
        limits = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s}
        group = open_group(rank, size, device=device, rendezvous=folder / "meeting", **limits)
        MODES[mode](group, folder)
        group.close()
        group.close()
    except TandemError as error:
        say(f"{type(error).__name__}: {error}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(float, sys.argv[5:7])))
