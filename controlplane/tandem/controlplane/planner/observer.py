"""Collects the planner's input: requests as they come and end, and rates as workers report them. No clock."""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tandem.controlplane.planner.records import ObservedRequest, Rates
from tandem.core.demand import WorkerSeen
from tandem.core.prefill_queue import PrefillSpeed
from tandem.core.state_enums import RoleName

_STEPS = 512
_ENOUGH = 8
"""Number of answers that have to end until their lengths count."""


@dataclass(slots=True)
class _Request:
    arrival_s: float
    prompt_tokens: int
    slo: str
    cached_tokens: int = 0
    output_tokens: int = 0
    """So far, where it has not ended."""
    has_ended: bool = False


class RecentRequests:
    """Requests of the last `keep_s` seconds.

    The length of an answer is unknown before it ends, and short ones end first. A running answer is taken to
    make as many tokens more as all of them made for each that ended: the mean of (exponential) lengths that are cut
    off.
    """

    def __init__(self, keep_s: float, usual: float = 1.0) -> None:
        """`usual`: tokens that are to come of an answer, until some of these have ended."""
        self._keep_s = keep_s
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self.usual = usual

    def came(self, key: str, now_s: float, prompt_tokens: int, slo: str = "") -> None:
        self._requests[key] = _Request(now_s, prompt_tokens, slo)
        while self._requests:
            first = next(iter(self._requests))
            if self._requests[first].arrival_s >= now_s - self._keep_s:
                break
            del self._requests[first]

    def started(self, key: str, cached_tokens: int) -> None:
        """Record that its prompt is being computed, except `cached_tokens` of it."""
        request = self._requests.get(key)
        if request is not None:
            request.cached_tokens = cached_tokens

    def progressed(self, key: str, output_tokens: int) -> None:
        """Record the length of its answer so far; it has not ended."""
        request = self._requests.get(key)
        if request is not None and not request.has_ended:
            request.output_tokens = output_tokens

    def ended(self, key: str, output_tokens: int) -> None:
        request = self._requests.get(key)
        if request is not None:
            request.output_tokens, request.has_ended = max(1, output_tokens), True

    def seen(self) -> list[ObservedRequest]:
        """Return all of them, by arrival."""
        ended = sum(one.has_ended for one in self._requests.values())
        if ended >= _ENOUGH:
            self.usual = sum(one.output_tokens for one in self._requests.values()) / ended
        return [
            ObservedRequest(
                arrival_s=one.arrival_s,
                prompt_tokens=one.prompt_tokens,
                slo=one.slo,
                output_tokens=one.output_tokens + (0 if one.has_ended else max(1, round(self.usual))),
                cached_tokens=one.cached_tokens,
            )
            for one in self._requests.values()
        ]


class MeasuredRates:
    """Rates from reports. The cost of a sequence in a decode step is fitted to steps with few and with many of them,
    also of different workers; while none differ, the workers' own figure is taken."""

    def __init__(self, known: Rates) -> None:
        """`known`: the rates until they are measured."""
        self._now = known
        self._steps: deque[tuple[int, float]] = deque(maxlen=_STEPS)

    @property
    def rates(self) -> Rates:
        return self._now

    def note(self, workers: Iterable[WorkerSeen]) -> None:
        """Take in a report of every worker that is there."""
        given = list(workers)
        speeds = [one.prefill_speed for one in given if one.role is not RoleName.DECODE]
        speeds = [speed for speed in speeds if speed.tokens_per_s > 0]
        decoding = [one for one in given if one.decode_step_s > 0 and one.decoding_sequences]
        decoding = [one for one in decoding if one.role is not RoleName.PREFILL]
        self._steps.extend((one.decoding_sequences, one.decode_step_s) for one in decoding)
        now = self._now
        if speeds:
            tokens_per_s = statistics.median(speed.tokens_per_s for speed in speeds)
            context_s = statistics.median(speed.context_s for speed in speeds)
            now = replace(now, prefill=PrefillSpeed(tokens_per_s=tokens_per_s, context_s=context_s))
        if self._steps:
            slopes = [one.decode_sequence_s for one in decoding]
            step_s, sequence_s = _line(list(self._steps), statistics.median(slopes) if slopes else 0.0)
            now = replace(now, decode_step_s=step_s, decode_sequence_s=sequence_s, decode_context_s=0.0)
        self._now = now


def _line(steps: list[tuple[int, float]], slope: float) -> tuple[float, float]:
    """Return seconds of a step, and for each sequence in it, neither below 0: least squares, where sequences differ."""
    mean_n = statistics.fmean(n for n, _ in steps)
    mean_s = statistics.fmean(s for _, s in steps)
    variance = sum((n - mean_n) ** 2 for n, _ in steps)
    if variance >= len(steps) * max(1.0, 0.01 * mean_n * mean_n):
        slope = sum((n - mean_n) * (s - mean_s) for n, s in steps) / variance
    slope = min(max(0.0, slope), mean_s / mean_n)
    return mean_s - slope * mean_n, slope
