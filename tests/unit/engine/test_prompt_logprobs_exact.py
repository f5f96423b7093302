"""Log-probabilities of prompts of the bundled model are those of transformers, in chunks, cached or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.core.handoff import TokenLogprob
from tandem.engine.engine import Engine
from tests.unit.engine.bundled import MODEL, prompt_of, request

COUNT = 4
CLOSE = 2e-4
pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="the bundled model is not here")


@pytest.fixture(scope="module")
def reference() -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Log-probabilities [tokens, vocab] behind every token of a prompt, computed at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(Path(MODEL), dtype=torch.float32, attn_implementation="eager")

    def compute(prompt: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
        return logits.log_softmax(-1)

    return compute


def check(got: list[TokenLogprob], prompt: tuple[int, ...], wanted: torch.Tensor) -> None:
    assert [each.token for each in got] == list(prompt[1:])
    for each, row in zip(got, wanted, strict=False):
        assert each.logprob == pytest.approx(float(row[each.token]), abs=CLOSE)
        above = int((row > row[each.token] + CLOSE).sum())
        close = int(((row - row[each.token]).abs() <= CLOSE).sum())
        assert above + 1 <= each.rank <= above + close
        assert [value for _, value in each.top] == pytest.approx(row.topk(COUNT).values.tolist(), abs=CLOSE)
        for token, value in each.top:
            assert value == pytest.approx(float(row[token]), abs=CLOSE)


@pytest.mark.parametrize("chunk", [16, 48, 512])
def test_as_in_transformers(
    chunk: int, reference: Callable[[tuple[int, ...]], torch.Tensor], new_engine: Callable[..., Engine]
) -> None:
    engine = new_engine(chunk_tokens=chunk, max_step_tokens=max(64, chunk))
    prompts = {f"{length}": prompt_of(length, 3) for length in (2, 17, 64, 150)}
    for name in ("cold", "warm"):
        for key, prompt in prompts.items():
            plain = request(f"{name} {key}", prompt, max_tokens=3, prompt_logprobs=COUNT)
            engine.add(dataclasses.replace(plain, arrival_s=float(len(prompt))))
        engine.add(request(f"{name} beside", prompt_of(90, 4), max_tokens=5))
        scores: dict[str, list[TokenLogprob]] = {}
        while engine.has_work:
            for part in engine.step().prompt_logprobs:
                scores.setdefault(part.key, []).extend(part.logprobs)
        for key, prompt in prompts.items():
            check(scores[f"{name} {key}"], prompt, reference(prompt))
