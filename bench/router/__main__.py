"""What the router costs by itself: added latency, streams and tokens a second on one pinned core, CPU by workers."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from bench import pages
from bench.report import Row, arguments_of, publish, quantile
from bench.router.client import Answer, Due, Load, request
from bench.router.house import MODEL, RouterBench, running
from bench.router.overload import Make, capacity, overload, serve, steady
from bench.router.peer import peer_running
from tandem.router.tokenization.tokenizer import Tokenizer

STEP_MS = 20.0
LONG_STEP_MS = 10.0
"""Step time of the workers that give long answers, so that as many run as ever will after five seconds."""
LIMITS_MS = {"1k ids": (2.5, 10.0), "1k text": (2.5, 10.0), "8k ids": (5.0, None), "8k text": (5.0, None)}
"""p50 and p99 of what the router adds to the first token, beyond tokenising."""
LIMITS_8K_MS = 5.0


@dataclass(slots=True)
class Prompts:
    """Makes prompts; no two share their first block. Text is that of `bench.pages`, cut at word ends."""

    dice: Random
    tokenizer: Tokenizer = field(default_factory=lambda: Tokenizer.load(MODEL))
    words: list[str] = field(default_factory=lambda: pages.text().split())

    def ids(self, tokens: int) -> list[int]:
        return [self.dice.randrange(300, 4000) for _ in range(tokens)]

    def text(self, tokens: int) -> str:
        """About that many tokens, within 1 %."""
        at = self.dice.randrange(len(self.words))
        words = (self.words[at:] + self.words * (1 + tokens // len(self.words)))[: tokens + 8]
        text = f"{self.dice.randrange(10**6)} " + " ".join(words)
        while len(ids := self.tokenizer.encode_now(text)) > 1.01 * tokens:
            text = text[: int(len(text) * max(tokens / len(ids), 0.5))].rstrip()
        return text


@dataclass(slots=True)
class Seen:
    """One load's answers with the workers' notes of them, in milliseconds, and the router's use of resources
    meanwhile."""

    answers: Sequence[Answer]
    noted: dict[str, Any]
    cpu_s: float
    wall_s: float
    router_wait_ms: float
    workers_wait_ms: float
    """Average time that their main threads were ready before they ran: neither has a core for itself alone."""

    def added_ms(self, kind: str) -> list[float]:
        """From sending a request to its first text at the client, less what the worker took."""
        return [1e3 * (a.first_s - a.sent_s - (first_s - arrived_s)) for a, arrived_s, first_s, _ in self._known(kind)]

    def to_worker_ms(self, kind: str) -> list[float]:
        """Of this: until the worker that prefills has it."""
        return [1e3 * (arrived_s - a.sent_s) for a, arrived_s, _, _ in self._known(kind)]

    def late_ms(self) -> list[float]:
        """Delay of requests after they were due: the client's core had other work."""
        return [1e3 * (a.sent_s - a.due_s) for a in self.answers]

    def out_ms(self, kind: str) -> list[float]:
        """From the worker's last token to the end of the answer at the client."""
        return [1e3 * (a.last_s - last_s) for a, _, _, last_s in self._known(kind) if last_s is not None]

    def _known(self, kind: str) -> list[tuple[Answer, float, float, float | None]]:
        return [(a, *self.noted["requests"][a.id]) for a in self.answers if a.kind == kind]


def offer(house: RouterBench, plan: Sequence[Due], marks: Sequence[tuple[float, Callable[[], None]]] = ()) -> Seen:
    """Send everything when it is due and wait for the end of all answers."""
    house.report()
    load, before = Load(house.port), house.waits()
    gc.disable()
    started_s, cpu_s = time.monotonic(), house.router_cpu_s()
    try:
        answers = load.run(plan, marks)
        wall_s, cpu_s = time.monotonic() - started_s, house.router_cpu_s() - cpu_s
    finally:
        gc.enable()
        load.close()
    print(f"{house.workers} workers, {len(plan)} requests: {100 * cpu_s / wall_s:.0f} % of a core", flush=True)
    router_ms, workers_ms = (now.mean_ms(then) for now, then in zip(house.waits(), before, strict=True))
    return Seen(answers, house.report(), cpu_s, wall_s, router_ms, workers_ms)


def long_answers(house: RouterBench, make: Make, rate: float, seconds: float, tokens: int) -> list[Row]:
    """Streams served of `rate` a second, and the router's use of resources, once as many run as ever will."""
    case = "128 token ids, 512 tokens"
    house.report()
    found = serve(house, make, rate, seconds, tokens)
    answers = [answer for answer in found.answers if not answer.is_refused]
    seen = Seen(answers, house.report(), 0.0, 0.0, 0.0, 0.0)
    return [
        Row(case, "streams a second, served", found.rate, "1/s", rate),
        Row(case, "tokens a second, served", found.rate * tokens, "1/s", rate * tokens),
        Row(case, "CPU a token, its part of the request included", 1e3 * found.cpu_ms / tokens, "µs"),
        *spread(case, "added to the first token", seen.added_ms("load"), (None, None)),
        *spread(case, "added to the last token", seen.out_ms("load"), (None, None)),
        Row(case, "late steps of the workers", 100 * late(seen), "%"),
    ]


def late(seen: Seen) -> float:
    """Share of the workers' steps that came half a step late: beyond a few percent they dominate the measurement."""
    return float(seen.noted["late_steps"]) / max(1, int(seen.noted["steps"]))


def latency(house: RouterBench, prompts: Prompts, seconds: float, load_rate: float) -> list[Row]:
    """Added latency of long prompts, while the core has half of its load of 128-token text prompts: `load_rate` a
    second. Limits are for a core that encodes 8k tokens of text in LIMITS_8K_MS, and in proportion on slower ones.

    Each request comes at any moment of its turn: at even distances all would meet the workers' steps at one moment of
    them, in one run in the middle of every burst of tokens, in the next between two.
    """

    def due(number: int, rate: float, kind: str, data: bytes, tokens: int) -> Due:
        return Due((number + prompts.dice.random()) / rate, kind, data, tokens)

    plan = [due(n, load_rate, "load", request(prompts.text(128), 32), 32) for n in range(int(load_rate * seconds))]
    tokenising: dict[str, float] = {}
    for size, tokens, rate in (("1k", 1024, 8), ("8k", 8192, 2)):
        texts = [prompts.text(tokens) for _ in range(int(rate * seconds))]
        tokenising[f"{size} text"] = statistics.median(timed_ms(prompts.tokenizer, text) for text in texts)
        tokenising[f"{size} ids"] = 0.0
        plan += [due(n, rate, f"{size} text", request(text, 4), 4) for n, text in enumerate(texts)]
        ids = [request(prompts.ids(tokens), 4) for _ in texts]
        plan += [due(n, rate, f"{size} ids", data, 4) for n, data in enumerate(ids)]
    seen = offer(house, sorted(plan, key=lambda one: one.at_s))
    case, rows = "half load", spread("half load", "added, 128 text", seen.added_ms("load"), (None, None))
    rows += spread(case, "late requests of the client", seen.late_ms(), (None, None))
    rows.append(Row(case, "wait of the router for its core, mean", seen.router_wait_ms, "ms"))
    rows.append(Row(case, "wait of the workers for theirs, mean", seen.workers_wait_ms, "ms"))
    rows.append(Row(case, "share of the core", 100 * seen.cpu_s / seen.wall_s, "%"))
    slower = max(1.0, tokenising["8k text"] / LIMITS_8K_MS)
    for kind, given in LIMITS_MS.items():
        limits = (given[0] * slower, None if given[1] is None else given[1] * slower)
        beyond = [added_ms - tokenising[kind] for added_ms in seen.added_ms(kind)]
        rows.append(Row(case, f"tokenising, {kind}", tokenising[kind], "ms"))
        rows += spread(case, f"added beyond tokenising, {kind}", beyond, limits)
        rows.append(
            Row(case, f"added until a worker has it, {kind}, p50", statistics.median(seen.to_worker_ms(kind)), "ms")
        )
    return rows


def timed_ms(tokenizer: Tokenizer, text: str) -> float:
    started_s = time.perf_counter()
    tokenizer.encode_now(text)
    return 1e3 * (time.perf_counter() - started_s)


def costs(house: RouterBench, prompts: Prompts, seconds: float, rate: float = 60.0) -> list[Row]:
    """CPU of a request and of each token more, by answers of two lengths; what an idle router uses is taken off."""
    case = f"{house.workers} workers"
    used, walls = {}, {}
    for tokens in (2, 34):
        plan = steady("load", partial(_of_ids, prompts, tokens), rate, seconds, tokens)
        offer(house, plan[: len(plan) // 4])
        seen = offer(house, plan)
        used[tokens], walls[tokens] = seen.cpu_s / len(plan), seen.wall_s / len(plan)
        first_ms = seen.added_ms("load")
    time.sleep(1.0)
    cpu_s = house.router_cpu_s()
    time.sleep(seconds / 2)
    idle = (house.router_cpu_s() - cpu_s) / (seconds / 2)
    used = {tokens: cpu_s - idle * walls[tokens] for tokens, cpu_s in used.items()}
    a_token = (used[34] - used[2]) / 32
    return [
        Row(case, "CPU of an idle router", 100 * idle, "%"),
        Row(case, "CPU a request", 1e3 * (used[2] - 2 * a_token), "ms"),
        Row(case, "CPU a token", 1e6 * a_token, "µs"),
        *spread(case, "added to the first token", first_ms, (None, None)),
    ]


def _of_ids(prompts: Prompts, tokens: int) -> bytes:
    return request(prompts.ids(128), tokens)


def spread(case: str, metric: str, values: Sequence[float], limits: tuple[float | None, float | None]) -> list[Row]:
    return [
        Row(case, f"{metric}, p50", quantile(values, 50), "ms", limits[0]),
        Row(case, f"{metric}, p99", quantile(values, 99), "ms", limits[1]),
    ]


def measure(which: Sequence[str], scale: float, has_peer: bool) -> list[Row]:
    prompts, rows = Prompts(Random(1)), []
    if {"text", "ids", "latency"} & set(which):
        with ExitStack() as stack:
            house = stack.enter_context(running(2, STEP_MS))
            text: Make = lambda: request(prompts.text(128), 32)  # noqa: E731
            ids: Make = partial(_of_ids, prompts, 32)
            most = 0.0
            if "ids" in which:
                rows += overload("128 token ids, 32 tokens", house, None, ids, 5 * scale, 32)[1]
            if "text" in which:
                peer = stack.enter_context(peer_running(2, STEP_MS)) if has_peer else None
                most, found = overload("128-token text, 32 tokens", house, peer, text, 5 * scale, 32)
                rows += found
            if "latency" in which:
                most = most or capacity(house, text, 5 * scale, 32)
                rows += latency(house, prompts, 10 * scale, most / 2)
    if "long" in which:
        with running(2, LONG_STEP_MS) as house:
            rows += long_answers(house, partial(_of_ids, prompts, 512), 15_000 / 512, 5 * scale, 512)
    for workers in (2, 16, 128):
        if f"w{workers}" in which:
            with running(workers, STEP_MS) as house:
                rows += costs(house, prompts, 4 * scale)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; 0 when everything was measured."""
    every = ("text", "ids", "long", "latency", "w2", "w16", "w128")
    parser = arguments_of("router", __doc__)
    parser.add_argument("--only", nargs="*", choices=every, default=every, help="some of the cases")
    parser.add_argument("--scale", type=float, default=1.0, help="how much longer to measure")
    parser.add_argument("--no-peer", action="store_true", help="without sglang-router beside it")
    arguments = parser.parse_args(argv)
    publish(
        "router", measure(arguments.only, arguments.scale, not arguments.no_peer), arguments.out, text=pages.digest()
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
