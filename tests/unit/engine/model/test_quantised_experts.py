"""`--quantize` of mixtures of experts: each expert's products, routers that stay as they are, and whole models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.model_config import WEIGHT_BYTES, read_model_config
from tandem.engine.model_work import model_work
from tandem.engine.models.experts import ExpertParameters, Experts
from tandem.engine.models.quantized_weights import QuantisedWeights
from tandem.engine.models.routing import SoftmaxRouter
from tandem.engine.quantizing import Quantizer
from tandem.engine.runner import ModelRunner
from tandem.engine.weights import Parameter
from tandem.kernels.quantized_linear import BITS, packed_bytes
from tandem.kernels.quantized_linear.reference import quantize_weight_reference, quantized_linear_reference
from tandem.kernels.silu_mul import silu_mul

HIDDEN, FEATURES, COUNT = 64, 48, 6
KINDS = ("int8", "int4")
OFF_BY_ROWS = 0.02
"""Most that answers are off those of the same numbers in fp32, of their norm: rows are quantised as they come."""
OFF = {"int8": 0.04, "int4": 0.35}
"""Most that half of a model's tokens are off fp32. Others may meet other experts, and are further off then."""


def parameter(tensor: Tensor) -> Parameter:
    return Parameter(parts=(), columns=tensor.shape[1] if tensor.dim() == 2 else None, tensor=tensor)


@pytest.fixture
def layer(dtype: torch.dtype) -> ExpertParameters:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Parameter:
        return parameter(torch.randn(shape, generator=generator).to(dtype))

    return ExpertParameters(
        router=drawn(COUNT, HIDDEN), gate_up=drawn(COUNT * 2 * FEATURES, HIDDEN), down=drawn(COUNT * HIDDEN, FEATURES),
        gate_up_bias=drawn(COUNT * 2 * FEATURES), down_bias=drawn(COUNT * HIDDEN),
    )  # fmt: skip


def answers(layer: ExpertParameters, product: Callable[[Parameter, Parameter], list[Any]], x: Tensor) -> Tensor:
    config = ExpertsConfig(count=COUNT, per_token=3, intermediate=FEATURES, layers=frozenset({0}))
    router = SoftmaxRouter(config, partial(functional.linear, weight=layer.router.tensor))
    assert layer.gate_up_bias is not None
    assert layer.down_bias is not None
    gate_ups, downs = product(layer.gate_up, layer.gate_up_bias), product(layer.down, layer.down_bias)
    return Experts(router, list(zip(gate_ups, downs, strict=True)), silu_mul)(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_experts_are_the_reference(kind: str, tokens: int, dtype: torch.dtype, layer: ExpertParameters) -> None:
    x = torch.randn((tokens, HIDDEN), generator=torch.Generator().manual_seed(6)).to(dtype)

    def numbers_of(weight: Parameter) -> list[tuple[Tensor, Tensor]]:
        every = weight.tensor.view(COUNT, -1, weight.tensor.shape[1])
        return [quantize_weight_reference(one, BITS[kind]) for one in every]

    def exact(weight: Parameter, bias: Parameter) -> list[Any]:
        return [
            partial(quantized_linear_reference, numbers=numbers, scales=scales, bias=one)
            for (numbers, scales), one in zip(numbers_of(weight), bias.tensor.view(COUNT, -1), strict=True)
        ]

    def dequantised(weight: Parameter, bias: Parameter) -> list[Any]:
        return [
            partial(functional.linear, weight=(numbers * scales[:, None]).to(dtype), bias=one)
            for (numbers, scales), one in zip(numbers_of(weight), bias.tensor.view(COUNT, -1), strict=True)
        ]

    expected, near = answers(layer, exact, x), answers(layer, dequantised, x)
    weights = QuantisedWeights(Quantizer(kind, is_exact=True), parameter(torch.ones(2, HIDDEN)), [layer], COUNT)
    for one in layer.members():
        weights.quantise(one)
    assert layer.router.tensor.device.type == "cpu", "a router stays"
    assert layer.gate_up.tensor.device.type == layer.down.tensor.device.type == "meta"
    found = answers(layer, weights.linears, x)
    # A column's scale of 4 bits is fitted in C, and may differ from torch's in its last bit.
    most = 1e-6 if kind == "int4" and dtype is torch.float32 else 0.0
    assert (found - expected).float().norm() <= most * expected.float().norm()
    error = (expected - near).float().norm() / near.float().norm()
    assert 0 < error < OFF_BY_ROWS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_model_is_near_the_model_of_the_numbers_that_it_has(
    name: str, kind: str, model_folder: Any, driver_of: Any, tokens_of: Any, tmp_path: Path
) -> None:
    """Beside it a plain one in fp32 with the dequantised matrices."""
    shutil.copytree(model_folder(name), tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for key, tensor in stored.items():
        if tensor.dim() == 2 and "embed_tokens" not in key and ".gate." not in key:
            numbers, scales = quantize_weight_reference(tensor, BITS[kind])
            stored[key] = numbers * scales[:, None]
    save_file(stored, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    sizes: dict[str, Any] = {"dtype": "float32", "num_blocks": 40, "max_model_len": 256}
    plain = ModelRunner(model_dir=tmp_path / "model", **sizes)
    tokens = tokens_of(150, plain.vocab_size)
    expected = driver_of(plain).chunked("a", tokens, 100)
    found = driver_of(ModelRunner(model_dir=model_folder(name), quantize=kind, **sizes)).chunked("a", tokens, 100)
    assert 0 < _median_error(found, expected) < 2 * OFF_BY_ROWS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_logits_are_near_those_of_transformers(
    name: str, kind: str, model_folder: Any, reference: Any, driver_of: Any
) -> None:
    expected = reference(name).logits[:150]
    for dtype in ("float32", "bfloat16"):
        runner = ModelRunner(
            model_dir=model_folder(name), dtype=dtype, num_blocks=40, max_model_len=256, quantize=kind
        )  # fmt: skip
        got = driver_of(runner).chunked("a", reference(name).tokens[:150], 100)
        assert 0.0005 < _median_error(got, expected) < OFF[kind] + (0.03 if dtype == "bfloat16" else 0), dtype


def _median_error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())


@pytest.mark.parametrize(("name", "kind"), [("mixtral", "int4"), ("gpt_oss", "int8")])
def test_deterministic_rows_do_not_depend_on_how_many_there_are(
    name: str, kind: str, model_folder: Any, driver_of: Any, tokens_of: Any
) -> None:
    runner = ModelRunner(
        model_dir=model_folder(name), dtype="bfloat16", num_blocks=60, max_model_len=256, quantize=kind,
        is_deterministic=True,
    )  # fmt: skip
    tokens = tokens_of(100, runner.vocab_size)
    alone = driver_of(runner).chunked("a", tokens, 100)
    for chunk in (1, 7, 64):
        assert torch.equal(driver_of(runner).chunked("a", tokens, chunk), alone), chunk


def test_experts_are_planned_at_their_size_in_memory(model_folder: Any) -> None:
    """Mixtral by hand: 2 layers of 4 query and 2 KV heads of 16, 8 experts of 192 features; 512 tokens."""
    options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 8, "max_model_len": 64, "quantize": "int8"}
    runner = ModelRunner(model_dir=model_folder("mixtral"), **options)
    experts = 8 * (packed_bytes(2 * 192, 64, 8) + packed_bytes(64, 192, 8))
    attention = packed_bytes(128, 64, 8) + packed_bytes(64, 64, 8)
    plain = 2 * (512 * 64 + 2 * 8 * 64 + 5 * 64)  # embedding, routers, norms
    assert runner.memory.weights == 2 * (experts + attention) + packed_bytes(512, 64, 8) + plain


def test_experts_are_read_at_their_size(model_folder: Any) -> None:
    config = read_model_config(model_folder("mixtral"))
    layout = ModelRunner(model_dir=model_folder("mixtral"), num_blocks=8, max_model_len=64).layout
    plain = model_work(config, dtype="bfloat16", layout=layout)
    assert plain.experts is not None
    for kind in KINDS:
        work = model_work(config, dtype="bfloat16", layout=layout, quantize=kind)
        assert work.experts is not None
        assert work.experts.expert_bytes == int(plain.experts.expert_bytes / 2 * WEIGHT_BYTES[kind])
        assert (work.token_flops, work.row_flops) == (plain.token_flops, plain.row_flops)
