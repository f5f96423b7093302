"""`--quantize`: logits stay near those of fp32, the plan counts the smaller weights, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.engine import quantizing
from tandem.engine.model_config import WEIGHT_BYTES, read_model_config
from tandem.engine.model_source import ModelSource, fingerprint
from tandem.engine.model_work import model_work
from tandem.engine.quantizing import quantizer_for
from tandem.engine.runner import ModelRunner
from tandem.engine.weights import Parameter

FAMILIES = ("bundled", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
ERROR = {"int8": 0.04, "int4": 0.35}
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
def test_logits_are_near_those_of_transformers(
    name: str, kind: str, quantised: Any, reference: Any, driver_of: Any
) -> None:
    expected = reference(name).logits[:150]
    for dtype in ("float32", "bfloat16"):
        got = driver_of(quantised(name, kind, dtype=dtype)).chunked("a", reference(name).tokens[:150], 100)
        error = float((got - expected).norm() / expected.norm())
        assert 0.0005 < error < ERROR[kind] + (0.03 if dtype == "bfloat16" else 0), dtype


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", ERROR)
@pytest.mark.parametrize("name", ["bundled", "gemma3"])
def test_deterministic_rows_do_not_depend_on_how_many_there_are(
    name: str, kind: str, quantised: Any, reference: Any, driver_of: Any
) -> None:
    """Single rows are C code's, chunks oneDNN's: whole numbers add up to the same."""
    for dtype in ("float32", "bfloat16"):
        runner, tokens = quantised(name, kind, dtype=dtype, is_deterministic=True), reference(name).tokens[:100]
        alone = driver_of(runner).chunked("a", tokens, 100)
        for chunk in (1, 7, 64):
            assert torch.equal(driver_of(runner).chunked("a", tokens, chunk), alone), (dtype, chunk)


def test_single_rows_are_near_the_same_rows_in_a_chunk(quantised: Any, reference: Any, driver_of: Any) -> None:
    for kind in ERROR:
        runner, tokens = quantised("bundled", kind, dtype="bfloat16"), reference("bundled").tokens[:60]
        together = driver_of(runner).chunked("a", tokens, 60)
        alone = driver_of(runner).chunked("a", tokens, 1)
        assert (alone - together).norm() < 0.03 * together.norm()


def test_weights_are_planned_at_their_size_in_memory(quantised: Any, model_folder: Any) -> None:
    """Matrices shrink; embedding and norms stay, and 4 bits need room to be unpacked in for each shape of a layer."""
    plain = quantised("bundled", "none", dtype="bfloat16").memory.weights
    config = read_model_config(model_folder("bundled"))
    embedding = 2 * config.vocab_size * config.hidden
    small = {kind: quantised("bundled", kind, dtype="bfloat16").memory.weights for kind in ERROR}
    assert embedding < small["int8"] < 0.5 * (plain - embedding) * 1.05 + embedding
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
    ModelRunner(model_dir=model_folder("bundled"), num_blocks=40, max_model_len=64, quantize="int4")
    assert max(seen) == 1 < len(seen)


def test_kv_is_never_shared_with_workers_of_other_weights(model_folder: Any) -> None:
    folder = model_folder("bundled")
    source, config = ModelSource(name="m", path=folder, commit="1"), read_model_config(folder)
    digests = {
        fingerprint(source, config, compute_dtype="bfloat16", weight_quantisation=kind).digest()
        for kind in ("none", *ERROR)
    }
    assert len(digests) == 3
    assert fingerprint(source, config, compute_dtype="bfloat16").weight_quantisation == "none"


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "said"), [
        ("int3", "cpu", "bfloat16", "--quantize int3 is unknown.*none, int8, int4"),
        ("int8", "cuda", "bfloat16", "--quantize int8 cannot be used on cuda.*--device cpu"),
        ("int4", "cpu", "float16", "--quantize int4 cannot be used with float16.*--dtype bfloat16"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_with_what_to_do(
    kind: str, device: str, dtype: str, said: str, model_folder: Any
) -> None:
    config = read_model_config(model_folder("bundled"))
    with pytest.raises(ConfigError, match=f"(?si){said}"):
        quantizer_for(kind, config, device=torch.device(device), dtype=dtype, is_deterministic=False)


def test_families_that_it_is_not_known_for_are_refused_by_name(
    model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "FAMILIES", frozenset({"QwenForCausalLM"}))
    with pytest.raises(ConfigError, match=r"(?i)with LlamaForCausalLM.*known for Qwen.*leave --quantize out") as said:
        ModelRunner(model_dir=model_folder("bundled"), num_blocks=4, max_model_len=64, quantize="int8")
    assert "int8" in str(said.value)
    config = read_model_config(model_folder("bundled"))
    assert quantizer_for("none", config, device=CPU, dtype="float16", is_deterministic=False) is None
