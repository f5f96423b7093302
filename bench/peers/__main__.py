"""A real model on whole servers of equal bits, on the same cores: Tandem, llama.cpp's server and transformers.

The same client sends the same requests to each, streamed over HTTP, closed-loop and open-loop; systems take turns.
transformers has no server and runs in this process, one prompt at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.load import TimedAnswer
from bench.peers import cases, results
from bench.peers.cases import CASES, Figures
from bench.peers.systems import FORMATS, LLAMA, LLAMA_BUILT, MISSING, TANDEM, served, servers
from bench.report import ROOT, Row, arguments_of, kept, publish
from tandem.controlplane.model_catalog import SMOLLM2
from tandem.controlplane.model_download import pull
from tandem.core.cpu_level import hold_libraries, named_level

TRANSFORMERS = {"transformers bf16": "bfloat16", "transformers fp32": "float32"}
SYSTEMS = {"mixed": "Tandem mixed", "1+1": "Tandem 1+1", "llama": LLAMA, "built": LLAMA_BUILT,
           "bf16": "transformers bf16", "fp32": "transformers fp32"}  # fmt: skip


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = arguments_of("peers", __doc__)
    parser.add_argument("--turns", type=int, default=2, help="of each system (default: 2)")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each prompt (default: 64)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "int8", "int4"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="bf16, fp32: transformers")
    parser.add_argument("--llama-server", type=Path, help="a llama-server built for this CPU, for --systems built")
    parser.add_argument("--picture", type=Path, help="of all rows in --out, .svg or .png")
    return parser.parse_args(words)


class Turns:
    """The measurement of one format: figures by system and case."""

    def __init__(self, arguments: argparse.Namespace, weights: str, file: Path) -> None:
        self._arguments, self._format, self._file = arguments, FORMATS[weights], file
        here = servers(arguments.llama_server)
        chosen = [SYSTEMS[name] for name in arguments.systems]
        self._servers = {name: here[name] for name in chosen if name in here}
        self._models: dict[str, Any] = {}
        if self._format.quantize == "none":
            self._models = {name: None for name in chosen if name in TRANSFORMERS}
        self.figures: dict[str, dict[str, Figures]] = {name: {} for name in arguments.cases}

    def run(self, turn: int) -> None:
        """One turn of every system."""
        for name in self._models:
            self._compute(name, turn)
        tokens = self._arguments.tokens
        for name, words in self._servers.items():
            with served(name, words, self._file, self._format, tokens) as api:
                asyncio.run(cases.warm(api, tokens))
                for case in self._arguments.cases:
                    self._add(name, case, asyncio.run(cases.measure(api, CASES[case], turn, tokens)))

    def _compute(self, name: str, turn: int) -> None:
        from bench.peers import in_process

        self._models[name] = self._models[name] or in_process.load(self._file, TRANSFORMERS[name])
        for case in self._arguments.cases:
            if CASES[case].clients == 1 and not CASES[case].shared_tokens:
                self._add(name, case, in_process.measure(self._models[name], CASES[case], turn, self._arguments.tokens))

    def _add(self, name: str, case: str, answers: Sequence[TimedAnswer]) -> None:
        figures = self.figures[case].setdefault(name, Figures())
        figures.add(answers, self._arguments.tokens)
        medians = ", ".join(f"{metric} {value:.1f} {unit}" for metric, (value, unit) in figures.medians().items())
        print(f"  {name}, {case}: {medians}", flush=True)

    def rows(self, label: str) -> list[Row]:
        """Rows of all cases; a case's name begins with `label`."""
        found: list[Row] = []
        for case, systems in self.figures.items():
            medians = {name: systems[name].medians() for name in (*TANDEM, *systems) if name in systems}
            found += results.rows_of(f"{label}: {CASES[case].words(self._arguments.tokens)}", medians)
        return found


def file_of(weights: str, folder: Path) -> Path:
    """The model in a format's type: as it is published, or written into `folder`."""
    published, kind = pull(SMOLLM2, ROOT / "build" / "models"), FORMATS[weights].gguf
    if f".{kind}." in SMOLLM2.member:
        return published
    from bench.peers.gguf_types import requantise

    made = folder / f"{cases.MODEL}-{kind}.gguf"
    if not made.exists():
        requantise(published, kind, made)
    return made


def main() -> int:
    arguments = parsed()
    hold_libraries()
    if LLAMA not in servers(arguments.llama_server):
        print(MISSING)
    level = named_level()
    load = {"tokens": arguments.tokens, "turns": arguments.turns}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="td-peers-") as folder:
        for weights in arguments.formats:
            turns = Turns(arguments, weights, file_of(weights, Path(folder)))
            for turn in range(arguments.turns):
                print(f"{weights}: turn {turn + 1} of {arguments.turns}", flush=True)
                turns.run(turn)
            rows += turns.rows(weights if level is None else f"{weights} at {level.label}")
    publish("peers", results.merged(kept(arguments.out, load), rows), arguments.out, load=load)
    if arguments.picture is not None:
        results.draw(results.merged(kept(arguments.out, load), rows), arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
