"""CI's slice of `make proof NAME=exactness`: the disaggregated path against transformers."""

import tempfile
from pathlib import Path

import pytest

from proof.exactness.__main__ import BUNDLED, FAMILIES, Case, Run, model_folder
from proof.exactness.reference import Reference

LENGTHS = (1, 16, 17, 65, 300)


@pytest.mark.parametrize("model", [BUNDLED, *FAMILIES])
@pytest.mark.parametrize(("transport", "chunk"), [("shm", 64), ("grpc", 16)])
def test_disaggregated_path_is_exact(model: str, transport: str, chunk: int) -> None:
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        folder = model_folder(model, seed=1, under=Path(name))
        verdicts = Run(Case(model, transport, chunk), folder, Reference(folder), 1, LENGTHS).verdicts()
    for path, verdict in verdicts.items():
        assert verdict.is_exact, (path, verdict)
        assert path == "three choices" or verdict.clear_tokens > 0.8 * verdict.tokens
