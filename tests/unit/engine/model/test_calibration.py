"""Test the weights of errors that random tokens give: each layer is passed as it was, in every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.calibration_text import NO_TEXT, CalibrationText
from tandem.engine.linear import Quantizer
from tandem.engine.models import decoder
from tandem.engine.models.calibration import WeightCalibration
from tandem.engine.models.quantized_weights import QuantisedWeights
from tandem.engine.runner import ModelRunner
from tests.unit.engine.model.driver import Driver

FAMILIES = ("bundled", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list["Watched"]:
    """Every calibration that a load makes."""
    found: list[Watched] = []

    def made(*given: Any) -> Watched:
        found.append(Watched(*given))
        return found[-1]

    monkeypatch.setattr(decoder, "WeightCalibration", made)
    return found


class Watched(WeightCalibration):
    """Keeps what the head met, and the inputs' weights of every matrix."""

    def __init__(self, quantised: QuantisedWeights, *given: Any) -> None:
        super().__init__(quantised, *given)
        self.normed = torch.empty(0)
        self.given: list[Tensor] = []
        quantise = quantised.quantise

        def watched(parameter: Any, importances: Any = None) -> None:
            self.given += [one for one in importances or () if one is not None]
            quantise(parameter, importances)

        quantised.quantise = watched  # type: ignore[method-assign]

    def importance_of_head(self, norm: Callable[[Tensor], Tensor]) -> Tensor:
        self.normed = norm(self.states)
        return super().importance_of_head(norm)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_pass_every_layer_as_it_was(
    name: str, model_folder: Callable[[str], Path], runs: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last layer they are where the plain model has them; longer than a window."""
    monkeypatch.setattr(Quantizer, "calibration_tokens", 60)
    folder, sizes = model_folder(name), dict[str, Any](num_blocks=160, max_model_len=256)
    loaded = ModelRunner(model_dir=folder, dtype="float32", quantize="int4", calibration=NO_TEXT, **sizes)
    (run,) = runs
    plain = ModelRunner(model_dir=folder, dtype="float32", **sizes)
    expected = Driver(plain).chunked("a", run.tokens.tolist(), 100)
    head = plain._decoder._to_logits(run.normed).float()
    torch.testing.assert_close(plain._decoder._capped(head), expected, atol=2e-4, rtol=2e-4)
    assert loaded._decoder._calibration is None, "its states are given up"
    squares = [one.diagonal() if one.dim() == 2 else one for one in run.given]
    assert all((one > 0).all() and one.isfinite().all() for one in squares)
    assert len(run.given) >= 4 * plain.config.layers, "every matrix of a layer, and experts that were chosen"


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_a_longer_text_passes_as_several_sequences(
    name: str, model_folder: Callable[[str], Path], runs: list[Watched]
) -> None:
    """The second one begins at the first position; a matrix meets all of them, two inputs at a time."""
    folder, sizes = model_folder(name), dict[str, Any](num_blocks=160, max_model_len=128, dtype="float32")
    text = CalibrationText(tuple(i * i % 251 for i in range(200)), is_given=True)
    ModelRunner(model_dir=folder, quantize="int4", calibration=text, **sizes)
    (run,) = runs
    plain = ModelRunner(model_dir=folder, **sizes)
    sequences = [*text.tokens[:128]], [*text.tokens[128:]]
    expected = torch.cat([Driver(plain).chunked("a", sequence, 128) for sequence in sequences])
    head = plain._decoder._to_logits(run.normed).float()
    torch.testing.assert_close(plain._decoder._capped(head), expected, atol=2e-4, rtol=2e-4)
    for one in run.given:
        assert one.dim() == 2
        assert torch.equal(one, one.t())
        assert (one.diagonal() > 0).all()


@pytest.mark.parametrize("text", [NO_TEXT, CalibrationText(tuple(range(200)), is_given=True)])
def test_it_is_the_same_whatever_the_threads(
    text: CalibrationText, model_folder: Callable[[str], Path], runs: list[Watched]
) -> None:
    """Workers of one model exchange KV: their weights are the same to the bit."""
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            ModelRunner(
                model_dir=model_folder("qwen3"), quantize="int4", num_blocks=4, max_model_len=64, calibration=text
            )
    finally:
        torch.set_num_threads(threads)
    first, second = (run.given for run in runs)
    assert len(first) == len(second) > 0
    assert all(torch.equal(*each) for each in zip(first, second, strict=True))


def test_other_formats_need_none(model_folder: Callable[[str], Path], runs: list[Watched]) -> None:
    for kind in ("none", "w8a8"):
        ModelRunner(model_dir=model_folder("bundled"), quantize=kind, num_blocks=4, max_model_len=64)
    assert runs == []
