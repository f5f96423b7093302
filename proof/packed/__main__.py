"""Mutated packed checkpoints end in a model or in one line: never in a crash, a traceback, seconds or gigabytes.

Slices of a random Llama in every form that checkpoints are packed in (see `proof.checkpoints`), each under a seed of
its own: settings in config.json, the header of safetensors and the numbers behind it are changed, and the checkpoint
is read as a worker reads it (see `proof.mutated_files`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from proof.checkpoints.packers import CHECKPOINTS
from proof.mutated_files import Entry, outcomes, run_slices
from tools.random_model import RandomModel, make_random_model

FORMS = tuple(CHECKPOINTS)
SHAPE = RandomModel(family="llama", hidden=128, intermediate=256, layers=1, heads=4, kv_heads=4)


def run_slice(seed: int, files: int) -> Entry:
    """Outcomes of so many mutations of one form, and those that are broken."""
    form = FORMS[seed % len(FORMS)]
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        write_packed(Path(name), form)
        found = outcomes("proof.packed.reading", [name], seed, files)
    return {"form": form, **found}


def write_packed(folder: Path, form: str) -> None:
    """A right checkpoint of `form`."""
    make_random_model(SHAPE, folder)
    chosen, file = CHECKPOINTS[form], folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(file).items():
        packed = {"": tensor.half()}
        if key.endswith("_proj.weight"):
            packed, _ = chosen.pack(tensor.float())
        stored |= {key.removesuffix("weight") + part if part else key: one.contiguous() for part, one in packed.items()}
    save_file(stored, file, {"format": "pt"})
    config = folder / "config.json"
    settings = {**json.loads(config.read_text()), "quantization_config": chosen.quantization_config}
    config.write_text(json.dumps(settings))


if __name__ == "__main__":
    sys.exit(run_slices("packed", __doc__, run_slice, slices=100, files=500))
