"""Costs of output grammars, and savings by drafts: compiling a sample of schemas, masks beside a step, and steps saved.

Parts: `compile`, `masks` (SHAPE_135M, 32 rows) and `drafts` (a billion random weights). In `drafts` the engine computes
and samples each step, and is then told the token of a valid instance of the schema: so the billion writes what a
trained model would, with spacing as json.dumps has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from llguidance import LLTokenizer

from bench.models import model_1b_for, model_135m
from bench.report import ROOT, Row, arguments_of, publish, quantile
from bench.scripted_runner import ScriptedRunner
from tandem.controlplane.model_catalog import SMOLLM2
from tandem.controlplane.model_download import pull
from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.errors import InvalidGrammarError
from tandem.core.output_grammar import OutputGrammar
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.output_grammars import OutputGrammars, load_tokenizer
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tandem.router.serving.grammar_check import check_grammar
from tandem.router.serving.output_grammar import schema_grammar

VOCAB, END = 49_152, 2
"""Of the tokenizer of SmolLM2, which all models here are given."""
ROWS, STEPS, PAIRS = 32, 48, 7
MOST_TOKENS = 160
"""Of an instance in `drafts`."""
NO_END = {"type": "array", "minItems": 4000, "items": {
    "type": "object", "additionalProperties": False, "required": ["name", "count", "kind", "tags"],
    "properties": {
        "name": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["file", "folder", "link"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
}}  # fmt: skip
"""A schema of which no answer ends early."""


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = arguments_of("grammars", __doc__)
    parser.add_argument("--sample", type=Path, required=True, help='a document a line: {"id", "schema", "tests"}')
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--instances", type=int, default=24, help="in `drafts` (default: 24)")
    parser.add_argument("--quantize", default="none", help="weights of both models (default: none)")
    return parser.parse_args(words)


class Sample:
    """Accepted schemas of a file with their first valid instances."""

    def __init__(self, file: Path, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.schemas: list[tuple[OutputGrammar, Any]] = []
        for line in file.read_text().splitlines():
            document = json.loads(line)
            valid = [test["data"] for test in document["tests"] if test["valid"]]
            try:
                grammar = asyncio.run(check_grammar(schema_grammar(document["schema"], "schema")))
            except InvalidGrammarError:
                continue
            self.schemas.append((grammar, valid[0] if valid else None))


def compile_rows(sample: Sample, grammars: OutputGrammars, _: argparse.Namespace) -> list[Row]:
    """Time of each schema, once."""
    grammars.compile('start: "a"').result()
    took_ms = []
    for grammar, _instance in sample.schemas:
        begun_s = time.perf_counter()
        grammars.compile(grammar.text).result()
        took_ms.append(1e3 * (time.perf_counter() - begun_s))
    case = f"compile {len(took_ms)} schemas"
    return [Row(case, f"p{percent}", quantile(took_ms, percent), "ms") for percent in (50, 99)]


def mask_rows(_: Sample, grammars: OutputGrammars, arguments: argparse.Namespace) -> list[Row]:
    """A step of 32 rows with and without a grammar each, in turns."""
    runner = ModelRunner(
        model_dir=model_135m(), dtype="bfloat16", num_blocks=1200, max_model_len=512, quantize=arguments.quantize
    )
    grammar = schema_grammar(NO_END, "schema").text
    free: list[float] = []
    guided: list[float] = []
    for _turn in range(PAIRS):
        free.append(_step_ms(runner, grammars, ""))
        guided.append(_step_ms(runner, grammars, grammar))
    ratios = [one / other for one, other in zip(guided, free, strict=True)]
    return [
        Row(f"{ROWS} rows, 135M", "step with grammars", statistics.median(guided), "ms", statistics.median(free)),
        Row(f"{ROWS} rows, 135M", "with / without, of pairs", statistics.median(ratios), ""),
    ]


def _step_ms(runner: ModelRunner, grammars: OutputGrammars, grammar: str) -> float:
    """Median time of a step with 32 choices."""
    engine = _engine(runner, grammars, draft_rows=16)
    for number in range(ROWS):
        sampling = SamplingParams(max_tokens=STEPS + 8, temperature=0.8, seed=number, grammar=grammar, ignore_eos=True)
        engine.add(_request(f"{number}", sampling))
    took_s = []
    while engine.has_work:
        result = engine.step()
        assert not result.failed, result.failed
        if result.decode_tokens == ROWS and not result.prefill_tokens:
            took_s.append(result.ended_s - result.started_s)
    return 1e3 * statistics.median(took_s[2:])


def draft_rows(sample: Sample, grammars: OutputGrammars, arguments: argparse.Namespace) -> list[Row]:
    """Instances of schemas, one after the other, with and without drafts, in turns."""
    tokenizer = sample.tokenizer
    runner = ScriptedRunner(
        model_dir=model_1b_for(VOCAB), dtype="bfloat16", num_blocks=100, max_model_len=1024, quantize=arguments.quantize
    )
    texts = [(grammar, json.dumps(instance, ensure_ascii=False)) for grammar, instance in sample.schemas
             if instance is not None]  # fmt: skip
    scripts = [(grammar, [*tokenizer.tokenize_str(text), END]) for grammar, text in texts]
    scripts = [(grammar, script) for grammar, script in scripts if len(script) <= MOST_TOKENS]
    chosen = random.Random(7).sample(scripts, min(arguments.instances, len(scripts)))
    runner.scripts = [script for _, script in chosen]
    took: dict[int, list[float]] = {0: [], 16: []}
    steps = {0: 0, 16: 0}
    for number, (grammar, script) in enumerate(chosen):
        for rows in took if number % 2 else reversed(took):
            engine = _engine(runner, grammars, draft_rows=rows)
            grammars.compile(grammar.text).result()
            sampling = SamplingParams(max_tokens=len(script), temperature=0.0, seed=number, grammar=grammar.text)
            engine.add(_request("a", sampling))
            tokens, spent_s = [], 0.0
            while engine.has_work:
                result = engine.step()
                assert not result.failed, result.failed
                tokens += [output.token for output in result.outputs]
                if result.decode_tokens:
                    spent_s += result.ended_s - result.started_s
                    steps[rows] += 1
            assert tokens == script
            took[rows].append(spent_s)
    count = sum(len(script) - 1 for _, script in chosen)
    with_drafts, without = (count / sum(took[rows]) for rows in (16, 0))
    each = statistics.median(other / one for one, other in zip(took[16], took[0], strict=True))
    case = f"{len(chosen)} instances, 1B"
    return [
        Row(case, "tokens a second", with_drafts, "tokens/s", without),
        Row(case, "speedup of an instance, median", each, ""),
        Row(case, "tokens a step", count / steps[16], "", count / steps[0]),
    ]


def _engine(runner: ModelRunner, grammars: OutputGrammars, *, draft_rows: int) -> Engine:
    config = SchedulerConfig(max_step_s=1e9, draft_rows=draft_rows)
    return Engine(runner, config=config, clock=MonotonicClock(), grammars=grammars)


def _request(key: str, sampling: SamplingParams) -> EngineRequest:
    prompt = tuple(range(1000, 1032))
    return EngineRequest(key=key, prompt=prompt, sampling=sampling, hash_root=BlockHash(bytes(16)))


PARTS = {"compile": compile_rows, "masks": mask_rows, "drafts": draft_rows}


def main() -> int:
    arguments = parsed()
    torch.set_num_threads(2)
    tokenizer = load_tokenizer(pull(SMOLLM2, ROOT / "build" / "models"), VOCAB, (END,))
    sample = Sample(arguments.sample, tokenizer)
    rows: list[Row] = []
    for name in arguments.parts:
        with closing(OutputGrammars(lambda: tokenizer)) as grammars:
            rows += PARTS[name](sample, grammars, arguments)
    publish("grammars", rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
