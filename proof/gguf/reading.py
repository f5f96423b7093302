"""A process that reads mutated GGUF files all the way, as workers and routers do, and reports how each ends."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from proof.gguf.mutations import mutate
from proof.mutated_files import reading_arguments, report
from tandem.core.gguf.file import GgufFile
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import tokenizer_digest
from tandem.engine.models.decoder import Decoder
from tandem.router.tokenization.tokenizer import Tokenizer

POSITIONS = 64


def main() -> int:
    """Lines of JSON on standard output, see `report`."""
    parser = reading_arguments("proof.gguf.reading", __doc__)
    parser.add_argument("base", type=Path, help="a right file")
    parser.add_argument("folder", type=Path, help="for mutated ones")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    whole = arguments.base.read_bytes()
    head = min(tensor.start for tensor in GgufFile(arguments.base).tensors.values())
    _read(arguments.base)
    path = arguments.folder / "mutated.gguf"

    def write(drawn: random.Random) -> str:
        file = bytearray(whole)
        names = mutate(drawn, file, head)
        path.unlink(missing_ok=True)  # one that is still mapped must not be cut
        path.write_bytes(file)
        return names

    return report(arguments, write, lambda: _read(path))


def _read(path: Path) -> None:
    """Read it as `up`, a worker and a router do."""
    tokenizer_digest(path)
    config = read_model_config(path)
    decoder = Decoder(config, dtype=torch.float32, max_positions=POSITIONS)
    decoder.load(path)
    Tokenizer.load(path).encode_now("The capital of France is 1 2 3 🙂 <|im_end|>")


if __name__ == "__main__":
    sys.exit(main())
