"""Whole decode steps of models of experts and latents on the Triton kernels, in the buffers that a CUDA graph captures:
the logits of the other paths, and nothing that would ask the host in the middle."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.memory_plan import StepBounds
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.kernels import backend
from tools.random_model import RandomModel, make_random_model

LENGTHS = (5, 20)
ASKING = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "is_nonzero", "equal"}
"""Operations of torch with a result, or a shape of it, that the host has to know."""


class AskedHostError(Exception):
    """On a CUDA device the host would have waited here; a capture would have failed."""


class NeverAsks(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ASKING:
            raise AskedHostError(name)
        return func(*args, **(kwargs or {}))


def never_asking(monkeypatch: pytest.MonkeyPatch, step: Callable[[], Tensor]) -> Tensor:
    def asked(_: Tensor) -> None:
        raise AskedHostError("tolist")

    with monkeypatch.context() as patch, NeverAsks():
        patch.setattr(Tensor, "tolist", asked)
        return step()


def make_runner(folder) -> ModelRunner:
    return ModelRunner(
        model_dir=folder, dtype="float32", num_blocks=16, max_model_len=128, bounds=StepBounds(tokens=32, sequences=4)
    )


def logits(runner: ModelRunner) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return logits of two prompts in one step, and the next step, of two decodes and two rows of padding, yet to be
    run."""
    tokens = torch.randint(0, 512, (sum(LENGTHS) + 2,), generator=torch.Generator().manual_seed(2)).tolist()
    groups, tables = len(runner.layout.groups), [(3, 7), (5, 0)]
    slices = [SeqSlice(length, length, (table,) * groups) for length, table in zip(LENGTHS, tables, strict=True)]
    positions = [place for length in LENGTHS for place in range(length)]
    prompts = runner.forward(StepBatch(tokens[2:], positions, slices, [LENGTHS[0] - 1, sum(LENGTHS) - 1]))
    decodes = [SeqSlice(1, length + 1, (table,) * groups) for length, table in zip(LENGTHS, tables, strict=True)]
    graphs = runner.decode_graphs((4,))
    step = StepBatch(tokens[:2], list(LENGTHS), decodes, [0, 1])
    assert graphs.takes(step)
    return prompts, lambda: graphs.run(step)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_a_decode_step_is_the_other_paths_and_never_asks_the_host(tmp_path, monkeypatch, family) -> None:
    make_random_model(RandomModel(family=family, seed=5, window=0 if family == "mixtral" else 40), tmp_path)
    monkeypatch.setattr(backend, "_chosen", backend.AUTO)
    expected, expected_step = logits(make_runner(tmp_path))
    with pytest.raises(AskedHostError):
        never_asking(monkeypatch, expected_step)
    wanted = expected_step()
    monkeypatch.setattr(backend, "_chosen", backend.TRITON)
    found, step = logits(make_runner(tmp_path))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(never_asking(monkeypatch, step), wanted, atol=1e-4, rtol=0)
