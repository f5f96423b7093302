"""Loads random models in bfloat16, runs steps of every shape, and prints which products of bfloat16 were torch's own:
{model: [operation, …]} as JSON. Arguments: a folder, and further options of `ModelRunner`, as JSON."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tools.random_model import ARCHITECTURES, LATENTS, RandomModel, make_random_model

PRODUCT = re.compile(r"mm|linear|mv|dot|matmul|attention|einsum")
PLACES = 8
"""Blocks of each sequence."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes products that are asked of torch or oneDNN with bfloat16 in them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if PRODUCT.search(str(func)) and any(
            isinstance(one, torch.Tensor) and one.dtype is torch.bfloat16 for one in args
        ):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def main() -> None:
    options = json.loads(sys.argv[2])
    found: dict[str, list[str]] = {}
    for family in families(options):
        for head_dim in (16, 32):  # without and with C code of attention
            folder = Path(sys.argv[1], f"{family}-{head_dim}")
            make_random_model(RandomModel(family=family, head_dim=head_dim, dtype="bfloat16"), folder)
            runner = ModelRunner(model_dir=folder, num_blocks=64 * PLACES, max_model_len=16 * PLACES, **options)
            with Watch() as watch:
                for step in steps():
                    assert runner.forward(step).isfinite().all()
            found[folder.name] = sorted(watch.found)
    print(json.dumps(found))


def families(options: Mapping[str, Any]) -> list[str]:
    """Return those that may be quantised under `options`."""
    return [family for family in ARCHITECTURES if "quantize" not in options or family not in LATENTS]


def steps() -> list[StepBatch]:
    """Prompts whole and in chunks, decodes of one, few and many sequences, and both in one step."""
    return [
        _step((40, 0), (1, 0)), _step((30, 40)), _step((1, 70)), _step(*[(1, 5)] * 3), _step(*[(1, 5)] * 20),
        _step((1, 5), (1, 6), (30, 0), (17, 20)),
    ]  # fmt: skip


def _step(*sequences: tuple[int, int]) -> StepBatch:
    """Return a step of sequences with (new, stored) tokens; all logits are wanted."""
    positions = [stored + at for new, stored in sequences for at in range(new)]
    slices = [
        SeqSlice(new, stored + new, (range(place * PLACES, (place + 1) * PLACES),))
        for place, (new, stored) in enumerate(sequences)
    ]
    return StepBatch([position % 100 for position in positions], positions, slices, list(range(len(positions))))


if __name__ == "__main__":
    main()
