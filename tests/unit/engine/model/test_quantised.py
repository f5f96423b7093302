"""Test `--quantize`, also for mixtures of experts."""

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

from tandem.core.errors import ConfigError
from tandem.engine import linear
from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.linear import Quantizer, format_of, quantizer_for
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import ModelSource, fingerprint
from tandem.engine.model_work import model_work
from tandem.engine.models.experts import ExpertParameters, Experts
from tandem.engine.models.quantized_weights import QuantisedWeights
from tandem.engine.models.routing import SoftmaxRouter
from tandem.engine.runner import ModelRunner
from tandem.engine.weight_formats import WEIGHT_BYTES, chosen_format
from tandem.engine.weights import Parameter
from tandem.kernels.quantized_linear import FORMATS, packed_bytes
from tandem.kernels.quantized_linear.reference import (
    OUTLIER_STEP,
    outlier_numbers_reference,
    quantize_weight_reference,
    quantized_linear_reference,
)
from tandem.kernels.silu_mul import silu_mul
from tests.unit.engine.model.driver import Driver, random_tokens

FAMILIES = ("bundled", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
ERROR = {"int8": 0.04, "w8a8": 0.04, "int4": 0.35, "w4a16": 0.35}
"""Most that logits may be off, of their own norm; random weights of few layers are worse than a trained model."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quantised(model_folder: Callable[[str], Path]) -> Callable[..., ModelRunner]:
    made: dict[tuple[Any, ...], ModelRunner] = {}

    def get(name: str, kind: str, *, dtype: str = "float32", **options: Any) -> ModelRunner:
        key = (name, kind, dtype, *options.items())
        if key not in made:
            made[key] = ModelRunner(
                model_dir=model_folder(name), dtype=dtype, num_blocks=160, max_model_len=1024, quantize=kind, **options
            )
        return made[key]

    return get


@pytest.mark.parametrize("kind", ERROR)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_near_those_of_transformers(name: str, kind: str, quantised: Any, reference: Any) -> None:
    expected = reference(name).logits[:150]
    for dtype in ("float32", "bfloat16"):
        got = Driver(quantised(name, kind, dtype=dtype)).chunked("a", reference(name).tokens[:150], 100)
        error = float((got - expected).norm() / expected.norm())
        assert 0.0005 < error < ERROR[kind] + (0.03 if dtype == "bfloat16" else 0), dtype


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", ERROR)
@pytest.mark.parametrize("name", ["bundled", "gemma3"])
def test_deterministic_rows_do_not_depend_on_how_many_there_are(
    name: str, kind: str, quantised: Any, reference: Any
) -> None:
    """Single rows are C code's, chunks oneDNN's: whole numbers add up to the same."""
    for dtype in ("float32", "bfloat16"):
        runner, tokens = quantised(name, kind, dtype=dtype, is_deterministic=True), reference(name).tokens[:100]
        alone = Driver(runner).chunked("a", tokens, 100)
        for chunk in (1, 7, 64):
            assert torch.equal(Driver(runner).chunked("a", tokens, chunk), alone), (dtype, chunk)


def test_single_rows_are_near_the_same_rows_in_a_chunk(quantised: Any, reference: Any) -> None:
    for kind in ERROR:
        runner, tokens = quantised("bundled", kind, dtype="bfloat16"), reference("bundled").tokens[:60]
        together = Driver(runner).chunked("a", tokens, 60)
        alone = Driver(runner).chunked("a", tokens, 1)
        assert (alone - together).norm() < 0.03 * together.norm()


def test_weights_are_planned_at_their_size_in_memory(quantised: Any, model_folder: Any) -> None:
    """Matrices shrink; embedding and norms stay, and 4 bits need room to be unpacked in for each shape of a layer."""
    plain = quantised("bundled", "none", dtype="bfloat16").memory.weights
    config = read_model_config(model_folder("bundled"))
    embedding = 2 * config.vocab_size * config.hidden
    small = {kind: quantised("bundled", kind, dtype="bfloat16").memory.weights for kind in ERROR}
    share = 1.05 + FORMATS["int8"].outliers / config.hidden
    assert embedding < small["int8"] < 0.5 * (plain - embedding) * share + embedding
    assert small["int8"] - embedding > 0.9 * 0.5 * (plain - embedding)
    layouts = quantised("bundled", "int4").layout
    work = {kind: model_work(config, dtype="bfloat16", layout=layouts, quantize=kind) for kind in ("none", *ERROR)}
    for kind in ERROR:
        assert work[kind].row_weight_bytes == int(work["none"].row_weight_bytes / 2 * WEIGHT_BYTES[kind])


def test_one_plain_matrix_is_in_memory_at_a_time(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.engine.models.decoder import Decoder

    seen: list[int] = []
    quantize = Decoder._quantize

    def watched(self: Decoder, parameter: Parameter) -> None:
        matrices = [one for one in self.parameters() if one.columns is not None and one is not self.embedding]
        seen.append(sum(one.tensor.device.type != "meta" for one in matrices))
        quantize(self, parameter)

    monkeypatch.setattr(Decoder, "_quantize", watched)
    ModelRunner(model_dir=model_folder("bundled"), num_blocks=40, max_model_len=64, quantize="w8a8")
    assert max(seen) == 1 < len(seen)
    for kind in ("int8", "int4"):
        seen.clear()
        ModelRunner(model_dir=model_folder("bundled"), num_blocks=40, max_model_len=64, quantize=kind)
        assert max(seen) == 4 < len(seen), "the matrices of one layer: tokens pass it as it was"


def test_kv_is_never_shared_with_workers_of_other_weights(model_folder: Any) -> None:
    folder = model_folder("bundled")
    source, config = ModelSource(name="m", path=folder, commit="1"), read_model_config(folder)
    digests = {
        fingerprint(source, config, compute_dtype="bfloat16", weight_quantisation=kind).digest()
        for kind in ("none", *map(format_of, ERROR))
    }
    assert len(digests) == 5
    assert format_of("int8") == "w8a16+32"
    assert format_of("none") == "none"
    assert fingerprint(source, config, compute_dtype="bfloat16").weight_quantisation == "none"


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "said"), [
        ("int3", "cpu", "bfloat16", "--quantize int3 is unknown.*none, auto, int8, w8a8, int4, w4a16"),
        ("int8", "cuda", "bfloat16", "--quantize int8 cannot be used on cuda.*--device cpu"),
        ("int4", "cpu", "float16", "--quantize int4 cannot be used with float16.*--dtype bfloat16"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_with_what_to_do(
    kind: str, device: str, dtype: str, said: str, model_folder: Any
) -> None:
    config = read_model_config(model_folder("bundled"))
    with pytest.raises(ConfigError, match=f"(?si){said}"):
        quantizer_for(kind, config, device=torch.device(device), dtype=dtype)


def test_families_that_it_is_not_known_for_are_refused_by_name(
    model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "QUANTISED_FAMILIES", frozenset({"QwenForCausalLM"}))
    with pytest.raises(ConfigError, match=r"(?i)with LlamaForCausalLM.*known for Qwen.*leave --quantize out") as said:
        ModelRunner(model_dir=model_folder("bundled"), num_blocks=4, max_model_len=64, quantize="int8")
    assert "int8" in str(said.value)
    config = read_model_config(model_folder("bundled"))
    assert quantizer_for("none", config, device=CPU, dtype="float16") is None


@pytest.mark.parametrize(
    ("architecture", "dtype", "is_on_cpu", "chosen"), [
        ("LlamaForCausalLM", "bfloat16", True, "int8"),
        ("GptOssForCausalLM", "float32", True, "int8"),
        ("LlamaForCausalLM", "float16", True, "none"),
        ("LlamaForCausalLM", "bfloat16", False, "none"),
        ("DeepseekV3ForCausalLM", "bfloat16", True, "none"),
    ],
)  # fmt: skip
def test_auto_is_int8_where_its_products_exist(architecture: str, dtype: str, is_on_cpu: bool, chosen: str) -> None:
    assert chosen_format("auto", architecture, dtype=dtype, is_on_cpu=is_on_cpu) == chosen
    assert chosen_format("int4", architecture, dtype=dtype, is_on_cpu=is_on_cpu) == "int4"


def test_a_model_with_auto_is_the_one_with_its_choice(model_folder: Any) -> None:
    """Its label, and so its KV, is that of workers which were given the format by name."""
    options: dict[str, Any] = {"num_blocks": 4, "max_model_len": 64}
    chosen = ModelRunner(model_dir=model_folder("bundled"), quantize="auto", **options)
    assert chosen.quantize == "int8"
    assert (
        ModelRunner(model_dir=model_folder("bundled"), dtype="float16", quantize="auto", **options).quantize == "none"
    )


HIDDEN, FEATURES, COUNT = 64, 48, 6
KINDS = ("int8", "w8a8", "int4", "w4a16")
OFF_BY_ROWS = {"int8": 2e-4, "w8a8": 0.02, "int4": 0.02, "w4a16": 2e-4}
"""Most that answers are off those of the same numbers in fp32, of their norm: rows are quantised as they come."""
OFF = {"int8": 0.04, "w8a8": 0.04, "int4": 0.35, "w4a16": 0.35}
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


def numbers_of(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Numbers, scales and columns with second numbers, where nothing is known of the inputs."""
    numbers, scales = quantize_weight_reference(matrix, FORMATS[kind].bits)
    if not (count := FORMATS[kind].outliers_of(matrix.shape[1])):
        return numbers, scales, None
    outliers = torch.arange(count)
    return torch.cat((numbers, outlier_numbers_reference(matrix, numbers, scales, outliers)), 1), scales, outliers


def values_of(matrix: Tensor, kind: str) -> Tensor:
    numbers, scales, outliers = numbers_of(matrix, kind)
    values = numbers[:, : matrix.shape[1]].float()
    if outliers is not None:
        values[:, outliers] += numbers[:, matrix.shape[1] :] / OUTLIER_STEP
    return values * scales[:, None]


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

    def every(weight: Parameter, bias: Parameter) -> list[tuple[Tensor, Tensor]]:
        matrices = weight.tensor.view(COUNT, -1, weight.tensor.shape[1])
        return list(zip(matrices, bias.tensor.view(COUNT, -1), strict=True))

    def exact(weight: Parameter, bias: Parameter) -> list[Any]:
        made = [(numbers_of(matrix, kind), one) for matrix, one in every(weight, bias)]
        return [
            partial(quantized_linear_reference, numbers=numbers, scales=scales, bias=one,
                    row_bits=FORMATS[kind].row_bits, outliers=outliers)
            for (numbers, scales, outliers), one in made
        ]  # fmt: skip

    def dequantised(weight: Parameter, bias: Parameter) -> list[Any]:
        return [
            partial(functional.linear, weight=values_of(matrix, kind).to(dtype), bias=one)
            for matrix, one in every(weight, bias)
        ]

    expected, near = answers(layer, exact, x), answers(layer, dequantised, x)
    weights = QuantisedWeights(Quantizer(kind), parameter(torch.ones(2, HIDDEN)), [layer], COUNT)
    for one in layer.members():
        weights.quantise(one)
    assert layer.router.tensor.device.type == "cpu", "a router stays"
    assert layer.gate_up.tensor.device.type == layer.down.tensor.device.type == "meta"
    found = answers(layer, weights.linears, x)
    # A column's scale of 4 bits is fitted in C, and may differ from torch's in its last bit.
    most = 1e-6 if FORMATS[kind].bits == 4 and dtype is torch.float32 else 0.0
    assert (found - expected).float().norm() <= most * expected.float().norm()
    error = (expected - near).float().norm() / near.float().norm()
    assert 0 < error < OFF_BY_ROWS[kind] + (0.01 if dtype is torch.bfloat16 and FORMATS[kind].row_bits == 16 else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_model_is_near_the_model_of_the_numbers_that_it_has(
    name: str, kind: str, model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it a plain one in fp32 with the dequantised matrices; nothing is known of the inputs."""
    monkeypatch.setattr(Quantizer, "calibration_tokens", 0)
    shutil.copytree(model_folder(name), tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for key, tensor in stored.items():
        if tensor.dim() == 2 and "embed_tokens" not in key and ".gate." not in key:
            stored[key] = values_of(tensor, kind)
    save_file(stored, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    sizes: dict[str, Any] = {"dtype": "float32", "num_blocks": 40, "max_model_len": 256}
    plain = ModelRunner(model_dir=tmp_path / "model", **sizes)
    tokens = random_tokens(150, plain.vocab_size)
    expected = Driver(plain).chunked("a", tokens, 100)
    found = Driver(ModelRunner(model_dir=model_folder(name), quantize=kind, **sizes)).chunked("a", tokens, 100)
    assert 0 < _median_error(found, expected) < 2 * OFF_BY_ROWS[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_logits_of_experts_are_near_those_of_transformers(
    name: str, kind: str, model_folder: Any, reference: Any
) -> None:
    expected = reference(name).logits[:150]
    for dtype in ("float32", "bfloat16"):
        runner = ModelRunner(
            model_dir=model_folder(name), dtype=dtype, num_blocks=40, max_model_len=256, quantize=kind
        )  # fmt: skip
        got = Driver(runner).chunked("a", reference(name).tokens[:150], 100)
        assert 0.0005 < _median_error(got, expected) < OFF[kind] + (0.03 if dtype == "bfloat16" else 0), dtype


def _median_error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())


@pytest.mark.parametrize(("name", "kind"), [("mixtral", "int4"), ("gpt_oss", "int8")])
def test_deterministic_rows_of_experts_do_not_depend_on_how_many_there_are(
    name: str, kind: str, model_folder: Any
) -> None:
    runner = ModelRunner(
        model_dir=model_folder(name), dtype="bfloat16", num_blocks=60, max_model_len=256, quantize=kind,
        is_deterministic=True,
    )  # fmt: skip
    tokens = random_tokens(100, runner.vocab_size)
    alone = Driver(runner).chunked("a", tokens, 100)
    for chunk in (1, 7, 64):
        assert torch.equal(Driver(runner).chunked("a", tokens, chunk), alone), chunk


def test_experts_are_planned_at_their_size_in_memory(model_folder: Any) -> None:
    """Mixtral by hand: 2 layers of 4 query and 2 KV heads of 16, 8 experts of 192 features; 512 tokens."""
    options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 8, "max_model_len": 64, "quantize": "int8"}
    runner = ModelRunner(model_dir=model_folder("mixtral"), **options)
    experts = 8 * (packed_bytes(2 * 192, 64 + 32, 8) + packed_bytes(64, 192 + 32, 8))
    attention = packed_bytes(128, 64 + 32, 8) + packed_bytes(64, 64 + 32, 8)
    plain = 2 * (512 * 64 + 2 * 8 * 64 + 5 * 64)  # embedding, routers, norms
    assert runner.memory.weights == 2 * (experts + attention) + packed_bytes(512, 64 + 32, 8) + plain


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
