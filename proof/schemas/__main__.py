"""JSON schemas of others: a schema that is accepted is enforced, and every other is refused by its place.

`--sample` names a file with a document a line: {"id", "schema", "tests": [{"valid", "data"}]}, such as a part of
MaskBench (guidance-ai/jsonschemabench). Of each accepted schema the grammar has to take its valid instances, to reject
the others, and the bundled model's answers under it have to validate where they end by themselves. Finished schemas are
kept in --out.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs
import torch

from bench.report import ROOT
from proof.record import Record, arguments_of, say_how_to_repeat
from proof.schemas.spellings import Spelling
from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.errors import InvalidGrammarError
from tandem.core.output_grammar import OutputGrammar
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason
from tandem.engine.engine import Engine
from tandem.engine.output_grammars import OutputGrammars, load_tokenizer
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tandem.router.serving.grammar_check import check_grammar
from tandem.router.serving.output_grammar import schema_grammar

MODEL = ROOT / "models" / "tandem-tiny"
PROMPT = "Describe it as JSON:"


def main() -> int:
    parser = arguments_of("schemas", __doc__)
    parser.add_argument("--sample", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--answers", type=int, default=1, help="of each accepted schema")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, at most")
    arguments = parser.parse_args()
    if not arguments.sample.is_file():
        print(f"there is no file {arguments.sample}")
        return 2
    about = {"sample": arguments.sample.name, "seed": arguments.seed, "answers": arguments.answers,
             "tokens": arguments.tokens}  # fmt: skip
    record = Record(arguments.out, "schemas", about, is_fresh=arguments.fresh)
    schemas: dict[str, dict[str, Any]] = record.content.setdefault("schemas", {})
    trial = Trial(arguments.seed, arguments.answers, arguments.tokens)
    for line in arguments.sample.read_text().splitlines():
        document = json.loads(line)
        if document["id"] not in schemas or schemas[document["id"]].get("broken"):
            schemas[document["id"]] = trial.of(document)
            record.save()
    trial.close()
    record.content["summary"] = summary(schemas)
    record.save()
    print(json.dumps(record.content["summary"], indent=1))
    broken = sum(bool(one.get("broken")) for one in schemas.values())
    if broken:
        say_how_to_repeat("schemas", f"--sample {arguments.sample} --seed {arguments.seed}")
    return record.verdict(len(schemas), broken=broken)


def summary(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts over all schemas; refusals by the last step of their place."""
    accepted = [one for one in schemas.values() if "refused" not in one]
    reasons = Counter(one["refused"].rpartition(".")[2] for one in schemas.values() if "refused" in one)
    counts = {name: sum(one[name] for one in accepted) for name in ("valid", "invalid", "ended", "cut")}
    return {"schemas": len(schemas), "accepted": len(accepted), **counts, "refused": dict(reasons.most_common())}


class Trial:
    """An engine on the bundled model, and the trial of one schema after the other."""

    def __init__(self, seed: int, answers: int, tokens: int) -> None:
        self._seed, self._answers, self._tokens = seed, answers, tokens
        torch.set_num_threads(1)  # steps of few rows: more threads would wait for each other
        runner = ModelRunner(model_dir=MODEL, dtype="float32", num_blocks=200, max_model_len=512)
        self._tokenizer = load_tokenizer(MODEL, runner.vocab_size, runner.eos_token_ids)
        self._grammars = OutputGrammars(lambda: self._tokenizer)
        self._engine = Engine(runner, config=SchedulerConfig(), clock=MonotonicClock(), grammars=self._grammars)

    def close(self) -> None:
        """End its threads."""
        self._grammars.close()

    def of(self, document: dict[str, Any]) -> dict[str, Any]:
        """Outcome of one document; `broken` says what went wrong."""
        grammar = schema_grammar(document["schema"], "schema")
        try:
            grammar = asyncio.run(check_grammar(grammar))
        except InvalidGrammarError as error:
            return {"refused": str(error.param), "why": error.why}
        tests = document["tests"]
        spelling = Spelling(grammar.text, document["schema"])
        broken = [f"an instance is taken for {not test['valid']}: {json.dumps(test['data'])[:200]}"
                  for test in tests if spelling.takes(test["data"]) is not test["valid"]]  # fmt: skip
        ended, wrong = self._generate(document["schema"], grammar)
        found = {"valid": sum(test["valid"] for test in tests), "invalid": sum(not test["valid"] for test in tests),
                 "ended": ended, "cut": self._answers - ended}  # fmt: skip
        return {**found, **({"broken": broken + wrong} if broken or wrong else {})}

    def _generate(self, schema: Any, grammar: OutputGrammar) -> tuple[int, list[str]]:
        """How many answers ended by themselves, and what is wrong with those."""
        sampling = SamplingParams(
            max_tokens=self._tokens, n=self._answers, temperature=0.8, seed=self._seed, grammar=grammar.text
        )
        prompt = tuple(self._tokenizer.tokenize_str(PROMPT))
        self._engine.add(EngineRequest(key="a", prompt=prompt, sampling=sampling, hash_root=BlockHash(bytes(16))))
        tokens: dict[int, list[int]] = {choice: [] for choice in range(self._answers)}
        ended: list[int] = []
        while self._engine.has_work:
            result = self._engine.step()
            if result.failed:
                return 0, [f"it failed: {error}" for error in result.failed.values()]
            for output in result.outputs:
                tokens[output.choice].append(output.token)
                if output.finish is FinishReason.STOP:
                    ended.append(output.choice)
        texts = [self._tokenizer.decode_str(tokens[choice][:-1]) for choice in ended]
        return len(ended), [f"an answer is not valid: {text[:200]}" for text in texts if not _is_valid(schema, text)]


def _is_valid(schema: Any, text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
