"""Cost of each precision in answers, of a real model: perplexity, distance and agreement of the next token's
distribution, over texts that packages ship.

Beside this project's precisions are those of GGUF, as the `gguf` package quantises the same weights, in fp32.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.engine.quality import PRECISIONS, logits_of
from bench.models import smollm2
from bench.quality.texts import KINDS, QUESTIONS, calibration, windows
from bench.report import Row, arguments_of, publish
from tandem.engine.calibration_text import MOST_TOKENS, CalibrationText, given_text
from tandem.engine.runner import ModelRunner
from tandem.router.tokenization.tokenizer import Tokenizer

OURS = {name: (dtype, quantize) for name, dtype, quantize in PRECISIONS}
CALIBRATED = ("int8 in fp32", "int4", "w4a16")
"""Formats that are measured with a calibration text, too."""
GGUF = ("Q8_0", "Q4_1", "Q4_0")
WINDOW, BLOCK = 512, 16
ANSWER_TOKENS = 160


@dataclass(slots=True)
class Sums:
    """Of one precision over the positions of texts of one kind."""

    surprise: float = 0.0
    positions: int = 0
    distances: list[float] = field(default_factory=list)
    same: int = 0

    def add(self, logits: Tensor, plain: Tensor, text: Sequence[int]) -> None:
        """`logits` and those in fp32 of every position of a text."""
        found, expected = logits.float().log_softmax(-1), plain.log_softmax(-1)
        self.surprise += float(torch.nn.functional.nll_loss(found[:-1], torch.tensor(text[1:]), reduction="sum"))
        self.positions += len(text) - 1
        self.distances += (expected.exp() * (expected - found)).sum(-1)[:-1].tolist()
        self.same += int((found[:-1].argmax(-1) == expected[:-1].argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.positions)


def main() -> None:
    parser = arguments_of("quality", __doc__)
    parser.add_argument("--windows", type=int, default=6, help=f"of {WINDOW} tokens, for each kind of text")
    arguments = parser.parse_args()
    file = smollm2()
    with tempfile.TemporaryDirectory() as folder:
        rows, answers = measured(file, Path(folder), arguments.windows)
    publish(
        "quality",
        rows,
        arguments.out,
        texts=f"{KINDS}, {arguments.windows} windows of {WINDOW} tokens each",
        answers=answers,
    )


def measured(file: Path, folder: Path, count: int) -> tuple[list[Row], Mapping[str, str]]:
    """Rows of a GGUF model, and each precision's answer to the first question; `folder` is for what is made."""
    tokenizer = Tokenizer.load(file)
    plain = _runner(file, *OURS["fp32"])

    def answer(prompt: Sequence[int]) -> list[int]:
        return greedy(plain, prompt, ANSWER_TOKENS, tokenizer)

    calibrating = folder / "calibration.txt"
    calibrating.write_text(calibration(tokenizer, answer, MOST_TOKENS))
    given = given_text(str(calibrating), file, vocab_size=plain.vocab_size, eos_token_ids=plain.config.eos_token_ids)
    runners = {name: plain if name == "fp32" else _runner(file, *kind) for name, kind in OURS.items()}
    runners |= {f"{name} by a text": _runner(file, *OURS[name], given) for name in CALIBRATED}
    runners |= {name: _runner(made, "float32", "none") for name, made in _requantised(file, folder)}
    sums = {(kind, name): Sums() for kind in KINDS for name in runners}
    for kind in KINDS:
        for text in windows(kind, tokenizer, answer, WINDOW, count):
            expected = logits_of(plain, text)
            for name, runner in runners.items():
                sums[kind, name].add(expected if runner is plain else logits_of(runner, text), expected, text)
            print(f"{kind}: {sums[kind, 'fp32'].positions} positions", flush=True)
    prompt = tokenizer.encode_now(tokenizer.render_chat([{"role": "user", "content": QUESTIONS[0]}]))
    answers = {name: tokenizer.decode(greedy(runner, prompt, 32, tokenizer)) for name, runner in runners.items()}
    return [row for kind in KINDS for name in runners for row in _rows(kind, name, sums)], answers


def _rows(kind: str, name: str, sums: Mapping[tuple[str, str], Sums]) -> Iterator[Row]:
    """Of plain precisions the baseline is fp32, of quantised ones bf16 and, for perplexity, fp32."""
    here, fp32, bf16 = (sums[kind, which] for which in (name, "fp32", "bf16"))
    yield Row(kind, f"{name}: perplexity, of fp32's", here.perplexity, "", fp32.perplexity)
    if name != "fp32":
        is_plain = name == "bf16"
        distance, same = statistics.mean(here.distances), 100 * here.same / here.positions
        beside = None if is_plain else statistics.mean(bf16.distances)
        yield Row(kind, f"{name}: KL, of bf16's", distance, "nats", beside)
        yield Row(kind, f"{name}: same first token", same, "%", None if is_plain else 100 * bf16.same / bf16.positions)


def _runner(model: Path, dtype: str, quantize: str, calibration: CalibrationText | None = None) -> ModelRunner:
    return ModelRunner(
        model_dir=model,
        dtype=dtype,
        quantize=quantize,
        calibration=calibration,
        num_blocks=WINDOW // BLOCK,
        block_tokens=BLOCK,
        max_model_len=WINDOW,
    )


def _requantised(file: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Folders with the model's numbers after a GGUF type, of every matrix."""
    if not GGUF:
        return
    import gguf
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    build: Any = AutoModelForCausalLM.from_config
    load: Any = load_gguf_checkpoint
    tensors = load(file, return_tensors=True, model_to_load=build(config, dtype=torch.float32))["tensors"]
    for name in GGUF:
        kind, made = gguf.GGMLQuantizationType[name], folder / name
        made.mkdir()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(made)
        save_file(
            {
                key: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(one.float().numpy(), kind), kind))
                if one.dim() == 2 else one.float() for key, one in tensors.items()
            },
            made / "model.safetensors",
        )  # fmt: skip
        yield name, made


def greedy(runner: ModelRunner, prompt: Sequence[int], most: int, tokenizer: Tokenizer) -> list[int]:
    """Up to `most` tokens of the answer, the end token among them."""
    end = tokenizer.encode_now("<|im_end|>", add_special_tokens=False)
    found: list[int] = []
    logits = logits_of(runner, prompt, 0, [len(prompt) - 1])
    while True:
        found.append(int(logits[-1].argmax()))
        if len(found) == most or found[-1] in end:
            return found
        logits = logits_of(runner, found[-1:], len(prompt) + len(found) - 1)


if __name__ == "__main__":
    main()
