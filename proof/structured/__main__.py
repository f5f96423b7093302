"""Structured answers of whole clusters: each is valid, and the same in every arrangement and after every disturbance.

The arrangements are a mixed worker, which the others are compared with; a hand-over of every request; a decode worker
killed while it has answers in the middle; a pool so small that requests are preempted; two tensor-parallel ranks, which
round sums of their own: such ranks in a small pool are compared with them. Every schema of `--sample` (as in
`proof.schemas`) is asked for whole and streamed, some together, and computed deterministically. Finished ones are kept
in --out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs

from proof.record import Record, arguments_of, say_how_to_repeat
from tandem.core.errors import InvalidGrammarError
from tandem.router.serving.grammar_check import check_grammar
from tandem.router.serving.output_grammar import schema_grammar
from tests.chaos.strikes import Cell, strike
from tests.chaos.survivors import Client
from tests.integration.router.transcript import Transcript
from tools.running_cluster import Cluster, running

EXACT = ("--threads", "1", "--deterministic", "--dtype", "float32")
HANDED_OVER = ("--disaggregation", "always")
ARRANGEMENTS: Mapping[str, Sequence[str]] = {
    "mixed": ("--mixed", "1"),
    "1+1": ("--prefill", "1", "--decode", "1", *HANDED_OVER),
    "killed": ("--prefill", "2", "--decode", "2", *HANDED_OVER),
    "preempted": ("--mixed", "1", "--kv-memory", "8MiB", "--max-model-len", "1024"),
    "tp2": ("--mixed", "1", "--tp", "2"),
    "tp2 preempted": ("--mixed", "1", "--tp", "2", "--kv-memory", "4MiB", "--max-model-len", "1024"),
}
REFERENCES: Mapping[str, str] = {"1+1": "mixed", "killed": "mixed", "preempted": "mixed", "tp2 preempted": "tp2"}
"""Arrangement to compare another one with: its answers must be the same to the letter."""
WAYS = ("whole", "streamed")
KILL = Cell("decode", "decode", "kill host")
TOGETHER = 12
"""Schemas asked for at once, each twice."""


def main() -> int:
    parser = arguments_of("structured", __doc__)
    parser.add_argument("--sample", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=120, help="of an answer, at most")
    parser.add_argument("--schemas", type=int, default=0, help="only the first so many that are accepted (0: all)")
    arguments = parser.parse_args()
    if not arguments.sample.is_file():
        print(f"there is no file {arguments.sample}")
        return 2
    about = {"sample": arguments.sample.name, "seed": arguments.seed, "tokens": arguments.tokens}
    record = Record(arguments.out, "structured", about, is_fresh=arguments.fresh)
    schemas = accepted(arguments.sample.read_text().splitlines())
    if arguments.schemas:
        schemas = dict(list(schemas.items())[: arguments.schemas])
    trial = Trial(schemas, arguments.seed, arguments.tokens)
    for name in ARRANGEMENTS:
        done = record.content.setdefault(name, {})
        todo = [key for key in schemas if key not in done or done[key].get("broken")]
        if not todo:
            continue
        hits = record.content.setdefault("hits", {})
        for found, disturbed in trial.tried(name, todo, record.content.get(REFERENCES.get(name, ""), {})):
            done |= found
            hits[name] = hits.get(name, 0) + disturbed
            record.save()
            print(f"{name}: {len(done)} of {len(schemas)}", flush=True)
    broken = {f"{name}, {key}": one["broken"] for name in ARRANGEMENTS for key, one in record.content[name].items()
              if one.get("broken")}  # fmt: skip
    record.content["summary"] = summary(record.content, schemas)
    record.save()
    print(json.dumps(record.content["summary"], indent=1))
    for where, what in broken.items():
        print(f"{where}: {what}")
    if broken:
        say_how_to_repeat("structured", f"--sample {arguments.sample} --seed {arguments.seed}")
    return record.verdict(len(schemas) * len(ARRANGEMENTS), broken=len(broken))


def accepted(lines: Sequence[str]) -> dict[str, Any]:
    """The schemas of documents that the router accepts."""
    found = {}
    for line in lines:
        document = json.loads(line)
        try:
            asyncio.run(check_grammar(schema_grammar(document["schema"], "schema")))
        except InvalidGrammarError:
            continue
        found[document["id"]] = document["schema"]
    return found


def disturbances(cluster: Cluster) -> int:
    """Requests of the cluster that were preempted or attempted again so far."""
    return int(cluster.metric("tandem_preemptions_total") + cluster.metric("tandem_reattempts_total"))


def summary(content: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of answers that ended by themselves, of disturbances, and of two ranks' answers that are those of one."""
    ended = sum(content["mixed"][key]["finish"] == "stop" for key in schemas)
    same = sum(content["mixed"][key]["answer"] == content["tp2"][key]["answer"] for key in schemas)
    return {"schemas": len(schemas), "arrangements": len(ARRANGEMENTS), "ended": ended, "disturbed": content["hits"],
            "ranks_equal_to_one": same}  # fmt: skip


class Trial:
    """Asks for the answers of schemas, and judges them."""

    def __init__(self, schemas: Mapping[str, Any], seed: int, tokens: int) -> None:
        self._schemas, self._seed, self._tokens = schemas, seed, tokens

    def tried(
        self, name: str, keys: Sequence[str], reference: Mapping[str, Any]
    ) -> Iterator[tuple[dict[str, dict[str, Any]], int]]:
        """Outcomes of schemas in an arrangement, some at a time, each with how often requests were disturbed."""
        flags = ARRANGEMENTS[name]
        with running(*flags, *(() if "--kv-memory" in flags else ("--kv-memory", "256MiB")), *EXACT) as cluster:
            for start in range(0, len(keys), TOGETHER):
                batch = keys[start : start + TOGETHER]
                before = disturbances(cluster)
                answers = self.ask(cluster, batch, is_killed=name == "killed")
                yield self.judged(answers, batch, reference), disturbances(cluster) - before

    def ask(self, cluster: Cluster, keys: Sequence[str], *, is_killed: bool) -> dict[str, Transcript]:
        """The answers of a cluster, by schema and way; `is_killed`: a decode worker ends while it has some."""
        bodies = {f"{way} {key}": self._body(key, way) for key in keys for way in WAYS}
        clients = strike(cluster, KILL, bodies).clients if is_killed else {
            name: Client(cluster, body) for name, body in bodies.items()
        }  # fmt: skip
        return {name: client.transcript() for name, client in clients.items()}

    def judged(
        self, answers: Mapping[str, Transcript], keys: Sequence[str], measure: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Outcome of each schema; `broken` says what went wrong."""
        return {key: self._judged(key, [answers[f"{way} {key}"] for way in WAYS], measure.get(key)) for key in keys}

    def _judged(self, key: str, answers: Sequence[Transcript], measure: Mapping[str, Any] | None) -> dict[str, Any]:
        if errors := [error for answer in answers for error in answer.errors]:
            return {"broken": str(errors)}
        whole, streamed = (answer.choices[0] for answer in answers)
        found = {"finish": whole.finishes[0], "answer": hashlib.sha256(whole.text.encode()).hexdigest()[:16]}
        if (streamed.text, streamed.finishes) != (whole.text, whole.finishes):
            return {**found, "broken": f"streamed {streamed.text[-80:]!r}, whole {whole.text[-80:]!r}"}
        if measure is not None and found != {name: measure[name] for name in found}:
            return {**found, "broken": f"it is not the undisturbed answer: {whole.text[-160:]!r}"}
        if found["finish"] == "stop" and not _is_valid(whole.text, self._schemas[key]):
            return {**found, "broken": f"invalid: {whole.text[-160:]!r}"}
        return found

    def _body(self, key: str, way: str) -> dict[str, Any]:
        wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": self._schemas[key], "strict": False}}
        body = {
            "model": "tandem-tiny", "messages": [{"role": "user", "content": f"Describe {key} as JSON:"}],
            "max_tokens": self._tokens, "temperature": 0.8, "seed": self._seed, "response_format": wanted,
        }  # fmt: skip
        return body if way == "whole" else {**body, "stream": True, "stream_options": {"include_usage": True}}


def _is_valid(text: str, schema: Any) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
