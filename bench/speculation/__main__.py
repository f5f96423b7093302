"""Measure what drafts of copied text save with SmolLM2, alone and with eight requests at once, beside none.

Tasks: `edit`, a text that is written again with a word replaced, with the text as the client's prediction; `rewrite`,
the same where only the prompt has the text; `chat`, questions whose answers repeat little. `planted`: each step is
computed, and then takes the token of a given answer: the text with the word replaced, which the text predicts, and an
answer that is predicted with a share of its tokens wrong, beside no drafts and fixed numbers of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.models import smollm2
from bench.report import ROOT, Row, arguments_of, publish
from bench.scripted_runner import ScriptedRunner
from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.config import SpeculationMode
from tandem.core.sampling import SamplingParams
from tandem.engine.draft_controller import DraftController
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tandem.router.tokenization.tokenizer import Tokenizer

TEXT_TOKENS, GIVEN, ANSWER = 1200, 60, 400
"""Of the text, of its new version that the prompt begins with, and of an answer."""
WORD, NEW_WORD = "worker", "node"
QUESTIONS = (
    "What is gravity? Explain it to a child.", "Write a short story about a fox and a river.",
    "How do plants grow?", "What should I cook with rice and eggs?", "Why is the sky blue?",
    "Explain what a database index is.", "Give advice to somebody who moves to a new city.", "What is inflation?",
)  # fmt: skip
FORMATS = {"bf16": "none", "int8": "int8", "int4": "int4"}
BATCHES = (1, 8)
WRONG = (0.0, 0.1, 0.3, 1.0)
FIXED = (0, 3, 7, 15)
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens a second behind the prompts, and the answers."""

    speed: float
    answers: tuple[tuple[int, ...], ...]
    steps: int


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments_of("speculation", __doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--parts", nargs="+", choices=("tasks", "planted"), default=["tasks", "planted"])
    parser.add_argument("--turns", type=int, default=3, help="of all settings after each other")
    arguments = parser.parse_args(words)
    torch.set_num_threads(2)
    rows = [row for name in arguments.formats for row in measured(name, arguments)]
    publish("speculation", rows, arguments.out, threads=2)


def measured(name: str, arguments: argparse.Namespace) -> list[Row]:
    file = smollm2()
    tokenizer = Tokenizer.load(file)
    runner = ScriptedRunner(
        model_dir=file, dtype="bfloat16", quantize=FORMATS[name], block_tokens=BLOCK, max_model_len=4096,
        num_blocks=max(BATCHES) * 220,
    )  # fmt: skip
    rows: list[Row] = []
    if "tasks" in arguments.parts:
        for batch in BATCHES:
            for task, prompts, predictions in tasks(tokenizer, batch):
                modes: dict[str, Setting] = {
                    "off": (SpeculationMode.OFF, [()] * batch, None),
                    "prediction": (SpeculationMode.PREDICTION, predictions, None),
                    "copy": (SpeculationMode.COPY, [()] * batch, None),
                }
                wanted = {mode: modes[mode] for mode in ("off", "prediction" if predictions[0] else "copy")}
                rows += compared(f"{name}, batch {batch}", task, runner, prompts, wanted, arguments.turns)
    if "planted" in arguments.parts:
        rows += planted(name, runner, tokenizer, arguments.turns)
    return rows


def tasks(tokenizer: Tokenizer, batch: int) -> list[tuple[str, list[list[int]], list[tuple[int, ...]]]]:
    """(name, prompts, predictions), each of `batch`."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode_now(text, add_special_tokens=False)

    document = encode((ROOT / "docs" / "failure-handling.md").read_text())
    prompts, predictions = [], []
    for number in range(batch):
        first = number * TEXT_TOKENS // 2
        text = tokenizer.decode(document[first : first + TEXT_TOKENS])
        edited = encode(text.replace(WORD, NEW_WORD))
        head = f"A text:\n\n{text}\n\nThe same text with '{NEW_WORD}' in place of '{WORD}':\n\n"
        prompts.append([*encode(head), *edited[:GIVEN]])
        predictions.append(tuple(encode(text)[GIVEN - 5 :]))
    chats = [
        tokenizer.encode_now(tokenizer.render_chat([{"role": "user", "content": question}]))
        for question in QUESTIONS[:batch]
    ]
    nothing: list[tuple[int, ...]] = [()] * batch
    return [("edit", prompts, predictions), ("rewrite", prompts, nothing), ("chat", chats, nothing)]


Setting = tuple[SpeculationMode, Sequence[Sequence[int]], int | None]
"""The mode, a prediction for each request, and a fixed number of drafts, None = as many as pay."""


def compared(
    case: str, task: str, runner: ModelRunner, prompts: Sequence[Sequence[int]], settings: dict[str, Setting],
    turns: int,
) -> list[Row]:  # fmt: skip
    """Medians of pairs with the first setting, which is without drafts."""
    found: dict[str, list[Run]] = {name: [] for name in settings}
    for _ in range(turns):
        for name, setting in settings.items():
            found[name].append(answered(runner, prompts, *setting))
    (plain, runs), *others = found.items()
    rows = [Row(case, f"{task}: {plain}", statistics.median(run.speed for run in runs), "tokens/s")]
    for name, more in others:
        ratio = statistics.median(run.speed / before.speed for run, before in zip(more, runs, strict=True))
        rows.append(Row(case, f"{task}: {name}, of {plain}", ratio * rows[0].value, "tokens/s", rows[0].value))
        same = [
            one == other for run, before in zip(more, runs, strict=True)
            for one, other in zip(run.answers, before.answers, strict=True)
        ]  # fmt: skip
        rows.append(Row(case, f"{task}: {name}, the same answers", 100 * sum(same) / len(same), "%", 100.0))
        tokens = sum(map(len, more[0].answers)) - len(prompts)
        rows.append(Row(case, f"{task}: {name}, tokens a step and request", tokens / more[0].steps / len(prompts), ""))
    for row in rows:
        print(f"{row.case}: {row.metric} {row.value:.2f} {row.unit}", flush=True)
    return rows


def planted(name: str, runner: ScriptedRunner, tokenizer: Tokenizer, turns: int) -> list[Row]:
    """Predictions of given answers, at a batch of one: as many drafts as pay, beside fixed numbers."""
    chat = tokenizer.encode_now(tokenizer.render_chat([{"role": "user", "content": QUESTIONS[0]}]))
    (answer,) = answered(runner, [chat], SpeculationMode.OFF, [()], None, ends=False).answers
    text = "\n\n".join((ROOT / "docs" / "failure-handling.md").read_text().split("\n\n")[2:])
    old, edited = (
        tokenizer.encode_now(one, add_special_tokens=False)[:ANSWER] for one in (text, text.replace(WORD, NEW_WORD))
    )
    draw = random.Random(0)
    cases = {f"{name}, edit": (old, edited)} | {
        f"{name}, {share:.0%} wrong": (
            [draw.randrange(1000, 40_000) if draw.random() < share else token for token in answer],
            list(answer),
        )
        for share in WRONG
    }
    rows = list[Row]()
    for case, (prediction, script) in cases.items():
        runner.scripts = [script]
        settings: dict[str, int | None] = {f"{count} drafts": count for count in FIXED} | {"chosen": None}
        speeds: dict[str, list[float]] = {one: [] for one in settings}
        for _ in range(turns):
            for one, count in settings.items():
                run = answered(runner, [chat], SpeculationMode.PREDICTION, [prediction], count, ends=False)
                assert list(run.answers[0]) == script
                speeds[one].append(run.speed)
        medians = {one: statistics.median(some) for one, some in speeds.items()}
        best = max((one for one in settings if one != "chosen"), key=medians.__getitem__)
        for other, label in (("0 drafts", "off"), (best, f"the best fixed number, {best}")):
            ratio = statistics.median(one / base for one, base in zip(speeds["chosen"], speeds[other], strict=True))
            rows.append(Row(case, f"chosen, of {label}", ratio * medians[other], "tokens/s", medians[other]))
            print(f"{case}: of {label} {ratio:.3f}", flush=True)
    runner.scripts = ()
    return rows


class _FixedDrafts(DraftController):
    """As many drafts as are offered, up to a number."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._fixed = count

    def counts(self, decodes: int, offers: Sequence[Any], room: int) -> list[int]:
        return [min(most, self._fixed, room) for _, most in offers]


def answered(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], mode: SpeculationMode,
    predictions: Sequence[Sequence[int]], fixed: int | None = None, *, ends: bool = True,
) -> Run:  # fmt: skip
    """Run greedy requests at once in a new engine, and time the steps behind the last one with a prompt."""
    engine = Engine(runner, config=SchedulerConfig(max_step_s=1e9, speculation=mode), clock=MonotonicClock())
    if fixed is not None:
        engine.scheduler.drafts.controller = _FixedDrafts(fixed)
    for number, (prompt, prediction) in enumerate(zip(prompts, predictions, strict=True)):
        sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, prediction=tuple(prediction), ignore_eos=not ends)
        root = BlockHash(bytes(16))
        engine.add(EngineRequest(key=str(number), prompt=tuple(prompt), sampling=sampling, hash_root=root))
    answers: list[list[int]] = [[] for _ in prompts]
    since_s, steps, tokens = 0.0, 0, 0
    while engine.has_work:
        result = engine.step()
        for output in result.outputs:
            answers[int(output.key)].append(output.token)
        if result.prefill_tokens:
            since_s, steps, tokens = time.perf_counter(), 0, 0
        else:
            steps, tokens = steps + 1, tokens + len(result.outputs)
    took_s = time.perf_counter() - since_s
    return Run(tokens / took_s, tuple(map(tuple, answers)), steps)


if __name__ == "__main__":
    main(sys.argv[1:])
