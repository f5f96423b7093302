"""Cost of a lossy hand-over in logits: the KV of a prompt goes through a codec, the text after it is scored.

The bundled model reads ordinary English (`bench.pages`), float32 throughout; a model of random weights would show
nothing here, for it has learnt no text that a codec could spoil. Scored is every token of the continuation, each after
exact tokens before it, with the prompt's KV as the receiver would have it. Exact KV gives the baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench import pages
from bench.report import ROOT, Row
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.kernels import kv_payload

BUNDLED = ROOT / "models" / "tandem-tiny"
PROMPT, SCORED = 384, 64
PASSAGES = 8
Lossy = Callable[[memoryview, int], None]
"""Function from a block's float32 numbers, in rows of so many, to those that arrive."""


def run() -> list[Row]:
    """KL divergence, largest difference of a log-probability, agreement of the best token."""
    torch.set_num_threads(1)
    ids = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(pages.text(), add_special_tokens=False).ids
    size = PROMPT + SCORED
    passages = [ids[place * size : (place + 1) * size] for place in range(min(PASSAGES, len(ids) // size))]
    return _model("tandem-tiny", BUNDLED, passages)


def _model(name: str, folder: Path, passages: list[list[int]]) -> list[Row]:
    blocks = -(-(PROMPT + SCORED) // 16) + 1
    runner = ModelRunner(model_dir=folder, dtype="float32", max_model_len=PROMPT + SCORED, num_blocks=blocks)
    exact = [_score(runner, passage, None) for passage in passages]
    rows: list[Row] = []
    for way, lossy in WAYS.items():
        kls, worst, same, count = [], 0.0, 0, 0
        for passage, wanted in zip(passages, exact, strict=True):
            got = _score(runner, passage, lossy)
            kls.append((wanted.exp() * (wanted - got)).sum(-1))
            likely = wanted > wanted.amax(-1, keepdim=True) - LIKELY
            worst = max(worst, float((wanted - got).abs()[likely].max()))
            same += int((wanted.argmax(-1) == got.argmax(-1)).sum())
            count += len(wanted)
        kl = torch.cat(kls)
        rows += [
            Row(f"{name}, {way}", "KL divergence, mean", 1e3 * float(kl.mean()), "mnat"),
            Row(f"{name}, {way}", "KL divergence, worst token", 1e3 * float(kl.max()), "mnat"),
            Row(
                f"{name}, {way}", f"log-probability, largest difference above e^-{LIKELY:.0f} of the best", worst, "nat"
            ),
            Row(f"{name}, {way}", "best token is the same", 100 * same / count, "%"),
        ]
    return rows


LIKELY = 7.0


def _score(runner: ModelRunner, passage: list[int], lossy: Lossy | None) -> Tensor:
    """Log-probabilities `[SCORED, vocab]` after the prompt and each token that follows it, but the last."""
    table = range(runner.num_blocks[0])
    prompt, rest = passage[:PROMPT], passage[PROMPT:]
    first = StepBatch(prompt, list(range(PROMPT)), [SeqSlice(PROMPT, PROMPT, (table,))], [PROMPT - 1])
    runner.forward(first)
    if lossy is not None:
        spec = runner.layout.groups[0]
        lossy(runner.pool_bytes(0)[: spec.blocks_for(PROMPT) * spec.block_bytes()], spec.block_tokens * spec.width)
    tokens = len(rest)
    positions = list(range(PROMPT, PROMPT + tokens))
    sequence = SeqSlice(tokens, PROMPT + tokens, (table,))
    logits = runner.forward(StepBatch(rest, positions, [sequence], list(range(tokens))))
    return torch.log_softmax(logits.double(), -1)


def _through(codec: str) -> Lossy:
    def change(numbers: memoryview, row_size: int) -> None:
        wire = memoryview(bytearray(kv_payload.encoded_bytes(numbers.nbytes // 4 // row_size, row_size)))
        kv_payload.encode(codec, numbers, "float32", wire, row_size=row_size)
        kv_payload.decode(codec, wire, numbers, "float32", row_size=row_size)

    return change


def _as(dtype: str) -> Lossy:
    def change(numbers: memoryview, _: int) -> None:
        narrow = memoryview(bytearray(numbers.nbytes // 2))
        kv_payload.convert(numbers, "float32", narrow, dtype)
        kv_payload.convert(narrow, dtype, numbers, "float32")

    return change


WAYS: dict[str, Lossy] = {
    "int8": _through("int8"),
    "fp8": _through("fp8"),
    "bfloat16": _as("bfloat16"),
    "float16": _as("float16"),
}
