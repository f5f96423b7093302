"""A worker's load as reported to its routers: measured rates, the queue in short, links. Belongs to the step loop."""

from __future__ import annotations

import statistics
from collections import deque

from tandem.core import metric_names as names
from tandem.core.link_speed import LinkSpeed
from tandem.core.prefill_queue import condensed
from tandem.core.proto_mapping import from_proto, to_proto
from tandem.engine.request import StepResult
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.role_interface import RoleContext

LOOK_EVERY_S = 2.0
"""Interval of looks at the links in use."""
_STEPS = 101
_FADE = 0.99
"""Weight of an older step, relative to the one after it."""


class DecodePace:
    """Duration of decode steps, with the time until the next one: tokens come no faster. The median of the latest, and
    the additional time of each further sequence (least squares)."""

    def __init__(self) -> None:
        self._latest_s: deque[float] = deque(maxlen=_STEPS)
        self._weight = self._n = self._s = self._nn = self._ns = 0.0

    def observe(self, sequences: int, took_s: float) -> None:
        """Take in a step that did nothing but decode."""
        self._latest_s.append(took_s)
        self._weight = self._weight * _FADE + 1.0
        self._n = self._n * _FADE + sequences
        self._s = self._s * _FADE + took_s
        self._nn = self._nn * _FADE + sequences * sequences
        self._ns = self._ns * _FADE + sequences * took_s

    @property
    def step_s(self) -> float:
        """Seconds of a step; 0 = there was none yet."""
        return statistics.median(self._latest_s) if self._latest_s else 0.0

    @property
    def sequence_s(self) -> float:
        """Seconds of a further sequence; 0 = not known: all steps had the same number of sequences, or noise hid it."""
        if not self._weight:
            return 0.0
        mean = self._n / self._weight
        variance = self._nn / self._weight - mean * mean
        if variance < 1e-3 * max(1.0, mean):
            return 0.0
        return max(0.0, (self._ns / self._weight - mean * self._s / self._weight) / variance)


class LinkNews:
    """A rank's reports of its links: each new measurement at once, the links in use every few seconds."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._links: list[w.LinkReport] = []
        self._looked_s = float("-inf")

    def publish(self) -> None:
        """Send the measurements since the last call."""
        if self._context.speeds is None:
            return
        for speed in self._context.speeds.take_news():
            self._context.outbox.put(e.RankToHost(link_measured=to_proto(e.LinkMeasured, speed)))
            self._looked_s = float("-inf")  # a new link is to be shown

    def learn(self, message: e.LinkSpeeds) -> None:
        """Take in what others measured from this host."""
        if self._context.speeds is not None:
            self._context.speeds.learn(from_proto(LinkSpeed, row) for row in message.rows)

    def links(self) -> list[w.LinkReport]:
        """The links in use, as of a few seconds ago."""
        now_s = self._context.clock.now_s()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._links = [to_proto(w.LinkReport, link) for link in self._context.sender.links()]
        return self._links


class LoadMeter:
    """Measures steps and writes reports. Belongs to the step loop's thread."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self.links = LinkNews(context)
        self._decoding = DecodePace()
        self._since_s: float | None = None

    def rest(self) -> None:
        """Note that the loop waits: the next step does not follow at once."""
        self._since_s = None

    def measure(self, result: StepResult) -> None:
        """Measure a step, and count it."""
        took_s = result.ended_s - result.started_s
        if result.decode_tokens and not result.prefill_tokens:
            since_s = result.started_s if self._since_s is None else self._since_s
            self._decoding.observe(result.decode_tokens, result.ended_s - since_s)
        self._since_s = result.ended_s
        self._context.count("steps")
        self._context.count("step_seconds", took_s)
        if result.prefill_tokens:
            self._context.count("prefill_step_seconds", took_s)
        self._context.count("prefill_tokens", result.prefill_tokens)
        self._context.count("decode_tokens", result.decode_tokens)
        if self._context.work is not None:
            self._context.count("model_flops", self._context.work.flops(result))
            self._context.count("model_read_bytes", self._context.work.bytes_read(result))
        self._context.count("preemptions", len(result.preempted))
        if result.recomputed_tokens:
            self._context.count(names.counter_key(names.WORKER_RECOMPUTED, cause="preempted"), result.recomputed_tokens)

    @property
    def decode_step_s(self) -> float:
        """Seconds from one token of a sequence to its next; 0 = there was none yet."""
        return self._decoding.step_s

    def report(self) -> w.LoadReport:
        """Report the load of this moment."""
        context, engine = self._context, self._context.engine
        load, now_s, rules = engine.load(), context.clock.now_s(), engine.config.queue
        speed = engine.pace.prefill_speed
        for name, value in context.receiver.counters().items():
            context.counters[name if name.startswith(names.PREFIX) else f"transfer_{name}"] = value
        context.counters[names.counter_key(names.LEASES)] = float(len(context.leases))
        context.counters.update(context.peaks)
        if engine.grammars is not None:
            context.counters.update(engine.grammars.counters())
        context.counters.update(engine.scheduler.drafts.controller.counters())
        if engine.swap is not None:
            context.counters[names.counter_key(names.PREEMPTED_SWAPPED)] = float(engine.swap.requests)
        return to_proto(
            w.LoadReport,
            load,
            blocks=[to_proto(w.GroupBlocksCount, ledger.counts(), group=ledger.group) for ledger in engine.ledgers],
            prefill_rate=speed.tokens_per_s,
            prefill_context_s=speed.context_s,
            decode_step_s=self.decode_step_s,
            decode_sequence_s=self._decoding.sequence_s,
            counters=context.counters,
            in_flight=len(context.requests),
            queue=[
                w.QueuedWork(due_in_s=due_s - now_s, tokens=tokens, requests=requests, attended=attended)
                for due_s, tokens, requests, attended in condensed(load.queue)
            ],
            queue_stretch=rules.stretch,
            queue_max_overtake_s=rules.max_overtake_s,
            links=self.links.links(),
        )
