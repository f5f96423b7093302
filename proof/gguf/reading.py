"""A process that reads mutated GGUF files all the way, as workers and routers do, and reports how each ends."""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path

import torch

from proof.gguf.mutations import mutate
from tandem.core.errors import StartupError
from tandem.core.gguf.file import GgufFile
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import tokenizer_digest
from tandem.engine.models.decoder import Decoder
from tandem.router.tokenization.tokenizer import Tokenizer

POSITIONS = 64
_KIB = 1 << 10


def main() -> int:
    """Lines of JSON on standard output: the mutation, its outcome ("read", or the error's line), seconds, memory."""
    parser = argparse.ArgumentParser(prog="proof.gguf.reading", description=__doc__)
    parser.add_argument("base", type=Path, help="a right file")
    parser.add_argument("folder", type=Path, help="for mutated ones")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    whole = arguments.base.read_bytes()
    head = min(tensor.start for tensor in GgufFile(arguments.base).tensors.values())
    _read(arguments.base)  # what is imported and kept once is no growth
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = arguments.folder / "mutated.gguf"
    for number in range(arguments.count):
        drawn = random.Random(f"{arguments.seed}:{number}")
        file = bytearray(whole)
        names = mutate(drawn, file, head)
        path.unlink(missing_ok=True)  # one that is still mapped must not be cut
        path.write_bytes(file)
        begun = time.monotonic()
        outcome = _outcome(path)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        line = {
            "number": number, "mutation": names, "outcome": outcome, "seconds": round(time.monotonic() - begun, 3),
            "grown_mib": round(grown / _KIB, 1),
        }  # fmt: skip
        print(json.dumps(line), flush=True)
    return 0


def _outcome(path: Path) -> str:
    try:
        _read(path)
    except StartupError as error:
        return error.message
    return "read"


def _read(path: Path) -> None:
    """Read it as `up`, a worker and a router do."""
    tokenizer_digest(path)
    config = read_model_config(path)
    decoder = Decoder(config, dtype=torch.float32, max_positions=POSITIONS)
    decoder.load(path)
    Tokenizer.load(path).encode_now("The capital of France is 1 2 3 🙂 <|im_end|>")


if __name__ == "__main__":
    sys.exit(main())
