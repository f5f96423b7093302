"""The process of the proof that tries inputs: the router's check and a worker's compiling and masks, as they run there.

Reads numbers of inputs, a line each, and writes what each took. A process of its own, so that it can be ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import orjson
from pydantic import ValidationError

from bench.report import ROOT
from proof.grammars.inputs import Inputs
from tandem.core.errors import InvalidGrammarError, InvalidRequestError
from tandem.engine.output_grammars import OutputGrammars, load_tokenizer
from tandem.router.api.http.output_fields import OutputFields, output_grammar_of
from tandem.router.serving.grammar_check import check_grammar

MODEL = ROOT / "models" / "tandem-tiny"
MASKS = 12
"""Tokens of an answer, so that masks of several places are computed."""


class Heartbeat:
    """A task that notes the longest time in which its event loop ran nothing else: the event loop's own wait of 1 ms
    counts, too, and so does other work on the machine."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = time.perf_counter()
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self._note()

    def _note(self) -> None:
        now_s = time.perf_counter()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s

    def take(self) -> float:
        """The longest time since the last call."""
        self._note()
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s


class Subject:
    """A router's check and a worker's grammars in one event loop."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        tokenizer = load_tokenizer(MODEL, 4096, (1,))
        self._grammars = OutputGrammars(lambda: tokenizer)

    async def serve(self) -> None:
        """Try every input that is asked for."""
        heart = Heartbeat()
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await self.attempt(int(line), heart)), flush=True)
        self._grammars.close()

    async def attempt(self, number: int, heart: Heartbeat) -> dict[str, Any]:
        """Outcome and costs of input `number`."""
        given = self._inputs.of(number)
        text = json.dumps({"structured_outputs": given.body})
        found: dict[str, Any] = {"kind": given.kind, "size": len(text)}
        reset_peak()
        before_mib = memory_mib("VmRSS")
        heart.take()
        begun_s = time.process_time()
        try:
            grammar = output_grammar_of(OutputFields.model_validate(orjson.loads(text)))
            found["parse_hold_s"] = heart.take()
            if grammar is not None:
                grammar = await check_grammar(grammar)
        except (InvalidGrammarError, InvalidRequestError, ValidationError) as error:
            found["refused"] = str(getattr(error, "why", error))[:160]
            grammar = None
        found |= {"check_s": time.process_time() - begun_s, "check_hold_s": heart.take()}
        if grammar is not None:
            found |= await self._generate(grammar.text, number, heart)
        found["mib"] = memory_mib("VmHWM") - before_mib
        return found

    async def _generate(self, grammar: str, number: int, heart: Heartbeat) -> dict[str, Any]:
        """Costs of compiling in a worker, and of the masks of some tokens."""
        random = Random(number)
        begun_s = time.process_time()
        try:
            compiled = await asyncio.wrap_future(self._grammars.compile(grammar))
        except InvalidGrammarError as error:
            return {"failed": f"compile: {error.why[:160]}", "compile_s": time.process_time() - begun_s}
        found: dict[str, Any] = {"compile_s": time.process_time() - begun_s, "compile_hold_s": heart.take()}
        longest_s, tokens = 0.0, 0
        matcher = self._grammars.matcher(compiled, ())
        while tokens < MASKS and not matcher.is_complete:
            begun_s = time.process_time()
            drafts = await asyncio.to_thread(matcher.drafts, 8)
            self._grammars.begin_masks({matcher: drafts})
            mask = await asyncio.to_thread(matcher.mask)
            allowed = (
                [token for token in range(4096) if mask[token >> 3] >> (token & 7) & 1] if not matcher.error else []
            )
            if not allowed:
                found["failed"] = f"mask {tokens}: {matcher.error[:160]}"
                break
            matcher.advance(random.choice(allowed))
            longest_s, tokens = max(longest_s, time.process_time() - begun_s), tokens + 1
            if matcher.error:
                found["failed"] = f"token {tokens}: {matcher.error[:160]}"
                break
        return {**found, "step_s": longest_s, "step_hold_s": heart.take(), "tokens": tokens}


def memory_mib(name: str) -> float:
    """A line of the process's status."""
    status = Path("/proc/self/status").read_text()
    return float(status.partition(f"{name}:")[2].split()[0]) / 1024


def reset_peak() -> None:
    """Begin VmHWM at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--sample", type=Path)
    parser.add_argument("--memory-mib", type=int, default=6144)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_mib << 20,) * 2)
    asyncio.run(Subject(Inputs(arguments.seed, arguments.sample)).serve())


if __name__ == "__main__":
    main()
