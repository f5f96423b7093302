"""A process that reads mutated packed checkpoints as workers do, and reports how each ends."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from proof.mutated_files import reading_arguments, report
from proof.packed.mutations import Checkpoint, mutate
from tandem.engine.model_config import read_model_config
from tandem.engine.models.decoder import Decoder

POSITIONS = 64


def main() -> int:
    """Lines of JSON on standard output, see `report`."""
    parser = reading_arguments("proof.packed.reading", __doc__)
    parser.add_argument("folder", type=Path, help="of a right checkpoint, which is changed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    whole = Checkpoint.read(arguments.folder)
    _read(arguments.folder)

    def write(drawn: random.Random) -> str:
        changed = whole.copy()
        names = mutate(drawn, changed)
        changed.write(arguments.folder)
        return names

    return report(arguments, write, lambda: _read(arguments.folder))


def _read(folder: Path) -> None:
    config = read_model_config(folder)
    decoder = Decoder(config, dtype=torch.float32, max_positions=POSITIONS)
    decoder.load(folder)


if __name__ == "__main__":
    sys.exit(main())
