"""Cost of each precision in answers: perplexity of the bundled model on text that it was not trained on, and distance
of logits from those in fp32. And a picture of that beside speed."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import ROOT, Row
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch

MODEL = ROOT / "models" / "tandem-tiny"
PRECISIONS = (
    ("fp32", "float32", "none"), ("bf16", "bfloat16", "none"), ("int8", "bfloat16", "int8"),
    ("int8 in fp32", "float32", "int8"), ("w8a8", "bfloat16", "w8a8"), ("int4", "bfloat16", "int4"),
    ("w4a16", "bfloat16", "w4a16"),
)  # fmt: skip
"""Name, compute dtype and quantisation."""
WINDOW = 512
"""Tokens of a text, as in the held-out loss of the model's card."""
_CASE = "bundled"


def measured(windows: int = 0) -> list[Row]:
    """Rows of the bundled model over so many windows of held-out text, 0 for all."""
    texts = heldout()[: windows or None]
    rows: list[Row] = []
    plain: list[Tensor] = []
    first = 0.0
    for name, dtype, quantize in PRECISIONS:
        runner = ModelRunner(
            model_dir=MODEL, dtype=dtype, quantize=quantize, num_blocks=WINDOW // 16, max_model_len=WINDOW
        )
        logits = [logits_of(runner, text) for text in texts]
        surprise = sum(_surprise(each, text) for each, text in zip(logits, texts, strict=True)) / len(texts)
        plain, first = plain or logits, first or math.exp(surprise)
        rows.append(Row(_CASE, f"{name}: perplexity, of fp32's", math.exp(surprise), "", first))
        off = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(logits, plain, strict=True)))
        whole = math.sqrt(sum(float(each.square().sum()) for each in plain))
        rows.append(Row(_CASE, f"{name}: error of logits, of their norm", off / whole, ""))
    return rows


def heldout() -> list[list[int]]:
    """Docstrings of the modules that training left out, as windows of tokens; this interpreter's library has them."""
    from tokenizers import Tokenizer

    sys.path.append(str(ROOT / "tools"))
    try:
        corpus: Any = importlib.import_module("tiny.corpus")
    finally:
        sys.path.remove(str(ROOT / "tools"))
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    begin, end = tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("<|eos|>")
    assert begin is not None
    assert end is not None
    ids: list[int] = []
    for text in corpus.heldout_docstrings():
        ids += [begin, *tokenizer.encode(text, add_special_tokens=False).ids, end]
    return [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]


def picture(rows: Sequence[Row], speeds: Sequence[tuple[str, dict[str, float]]], path: Path) -> None:
    """Perplexity of the bundled model over the speed of others, one panel for each of `speeds`: its name and tokens a
    second by precision. Raises OSError."""
    from matplotlib.figure import Figure  # draws into files and needs no display

    found = dict(_perplexities(rows))
    figure = Figure(figsize=(4.5 * len(speeds), 4), layout="constrained")
    for axes, (title, tokens) in zip(figure.subplots(1, len(speeds), squeeze=False)[0], speeds, strict=True):
        for name, speed in tokens.items():
            axes.plot([speed], [found[name]], "o")
            axes.annotate(name, (speed, found[name]), textcoords="offset points", xytext=(6, 4))
        axes.set(xlabel="tokens/s", ylabel="perplexity, bundled model, held-out text", title=title)
        axes.grid(alpha=0.3)
        axes.margins(0.2)
    figure.savefig(path)


def _perplexities(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    for row in rows:
        name, _, what = row.metric.partition(": ")
        if what.startswith("perplexity"):
            yield name, row.value


def logits_of(runner: ModelRunner, tokens: Sequence[int], start: int = 0, rows: Sequence[int] | None = None) -> Tensor:
    """Compute the logits of `rows` (None = all) of tokens that follow the first `start` tokens of the only sequence."""
    end, wanted = start + len(tokens), list(range(len(tokens)) if rows is None else rows)
    sequence = SeqSlice(len(tokens), end, (range(runner.num_blocks[0]),))
    return runner.forward(StepBatch(list(tokens), list(range(start, end)), [sequence], wanted))


def _surprise(logits: Tensor, text: Sequence[int]) -> float:
    """Nats a token."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:])))
