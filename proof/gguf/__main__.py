"""Mutated GGUF files end in a model or in one line: never in a crash, a traceback, seconds or gigabytes.

Slices of random models of each family that GGUF files have, with other types of blocks, each under a seed of its own:
every file is read as a cluster reads it, config, weights and tokenizer (see `proof.mutated_files`).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from proof.mutated_files import Entry, outcomes, run_slices
from tools.gguf_model import GgufModel, write_gguf
from tools.random_model import RandomModel, make_random_model

BASES = (
    ("llama", "Q4_0"), ("llama", "F16"), ("qwen2", "Q8_0"), ("qwen3_moe", "Q5_0"), ("gemma3", "Q4_1"),
    ("mixtral", "MXFP4"), ("gemma2", "F32"), ("qwen3", "Q5_1"),
    ("gpt_oss", "MXFP4"), ("deepseek_v3", "Q8_0"), ("deepseek_v2", "F16"),
)  # fmt: skip


def run_slice(seed: int, files: int) -> Entry:
    """Outcomes of so many mutations of one model, and those that are broken."""
    family, kind = BASES[seed % len(BASES)]
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        folder = Path(name)
        make_random_model(RandomModel(family=family, heads=4, kv_heads=2, seed=seed), folder / "model")
        write_gguf(folder / "model", folder / "base.gguf", GgufModel(kind=kind))
        found = outcomes("proof.gguf.reading", [str(folder / "base.gguf"), name], seed, files)
    return {"family": family, "type": kind, **found}


if __name__ == "__main__":
    sys.exit(run_slices("gguf", __doc__, run_slice, slices=24, files=500))
