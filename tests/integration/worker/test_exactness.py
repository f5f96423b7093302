"""CI's slice of `make proof NAME=exactness`: the disaggregated path, and others, against transformers."""

import tempfile
from pathlib import Path

import pytest
import torch

from proof.exactness.__main__ import BUNDLED, FAMILIES, Case, Run, check_path, model_folder
from proof.exactness.paths import PATHS
from proof.exactness.reference import Reference

LENGTHS = (1, 16, 17, 65, 300)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("model", [BUNDLED, *FAMILIES])
@pytest.mark.parametrize(("transport", "chunk"), [("shm", 64), ("grpc", 16)])
def test_disaggregated_path_is_exact(model: str, transport: str, chunk: int) -> None:
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        folder = model_folder(model, seed=1, under=Path(name))
        verdicts = Run(Case(model, transport, chunk), folder, Reference(folder), 1, LENGTHS).verdicts()
    for path, verdict in verdicts.items():
        assert verdict.is_exact, (path, verdict)
        assert path == "three choices" or verdict.clear_tokens > 0.8 * verdict.tokens


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_every_path_of_one_worker_is_exact(family: str, dtype: str) -> None:
    """Ranks are left to tests/integration/engine/test_tensor_parallel.py, transfers to the test above."""
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        folder = model_folder(family, seed=1, under=Path(name))
        reference = Reference(folder, getattr(torch, dtype))
        for path in PATHS:
            if not path.endswith("ranks") and path != "transferred":
                assert check_path(family, path, dtype, folder, reference, 1).complaint == "", path
