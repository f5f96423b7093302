"""Forecasts the service of the last minutes' requests by another split of the workers: they are replayed to it.

Steps are not replayed one by one, but in aggregate: a worker that computes a prompt is busy for its measured seconds,
and all sequences of a decode worker get a token a step, with a length by their number; arrivals during a step
wait for the next. A mixed worker does both: every sequence gets a token for each chunk. KV leaves while its prompt is
computed, over one wire a worker. The requests are replayed three times in a row, until all of the second time have
ended, and those count: a cluster in service is not empty. Some 50 µs a request and time. docs/planning.md lists the
omissions.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence

from tandem.controlplane.planner.records import Forecast, ObservedRequest, Rates, RoleSplit
from tandem.core.config import SloSection
from tandem.core.prefill_queue import attended

_EPSILON = 1e-9
_NEAR = 0.25
"""Weight of coming near a promise, compared with keeping it."""
_PARTS = 8
"""Number of parts in which a chunk's KV leaves: the first while the others are computed, the last when the chunk is."""
_NOTHING = SloSection()


def forecast(
    split: RoleSplit,
    recent: Sequence[ObservedRequest],
    rates: Rates,
    promises: Mapping[str, SloSection],
    *,
    load: float = 1.0,
    decode_rates: Rates | None = None,
    is_warm: bool = True,
) -> Forecast:
    """Return the forecast. `load`: arrivals come so many times as fast. `decode_rates`: of decode workers unlike the
    others. Not `is_warm`: they come once, to an empty cluster. ValueError if the split cannot serve or `recent` is
    empty."""
    if not split.can_serve or not recent:
        raise ValueError(f"{split} cannot serve" if recent else "there are no requests to replay")
    run = _Replay(split, recent, rates, decode_rates or rates, load, is_warm)
    run.play()
    count = len(recent)
    ttft_s, itl_s = run.ttft_s[run.counted], run.itl_s[run.counted]
    kept = near = 0.0
    for one, first_s, each_s in zip(recent, ttft_s, itl_s, strict=True):
        promise = promises.get(one.slo, _NOTHING)
        ratio = max(
            first_s / promise.ttft_s if promise.ttft_s else 0.0, each_s / promise.itl_s if promise.itl_s else 0.0
        )
        kept += ratio <= 1.0
        near += 1.0 if ratio <= 1.0 else 1.0 / ratio
    places = split.prefill + split.mixed
    return Forecast(
        split=split,
        attained=kept / count,
        score=(kept + _NEAR * near) / (count * (1 + _NEAR)),
        goodput_per_s=kept / run.span_s if run.span_s else 0.0,
        ttft_p90_s=_p90(ttft_s),
        itl_p90_s=_p90([s for s, one in zip(itl_s, recent, strict=True) if one.output_tokens > 1]),
        prefill_busy=min(1.0, run.computed_s / (places * max(run.ended_s, _EPSILON))),
    )


def _p90(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.9 * (len(ordered) - 1))] if ordered else 0.0


class _Worker:
    """`clock` counts the decode steps so far; a sequence that joins at 5 and makes 10 tokens ends at 15. One that comes
    from another worker while the sixth step runs, at 5.3, joins at 6."""

    __slots__ = (
        "arrives_s", "at_s", "chunk_s", "clock", "context", "ends", "is_full", "kv_tokens", "left_s", "out_free_s",
        "prompt", "rates", "version",
    )  # fmt: skip

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.at_s = self.clock = self.left_s = self.chunk_s = self.context = 0.0
        self.prompt: int | None = None
        self.ends: list[tuple[float, int]] = []
        self.kv_tokens = 0
        """Of sequences and, where prompts are computed for others, of those that are not there yet."""
        self.is_full = False
        self.out_free_s = self.arrives_s = 0.0
        """When its wire has sent all data given to it, and when the last of its prompt's KV is there."""
        self.version = 0

    def step_s(self) -> float:
        """Return seconds of the decode step, with the chunk that is computed in it."""
        rates, count = self.rates, len(self.ends)
        decode_s = rates.decode_step_s + rates.decode_sequence_s * count + rates.decode_context_s * self.context
        return max(_EPSILON, decode_s + (self.chunk_s if self.prompt is not None else 0.0))

    def advance(self, now_s: float) -> None:
        passed_s, self.at_s = now_s - self.at_s, now_s
        if self.ends:
            steps = passed_s / self.step_s()
            self.clock += steps
            self.left_s -= steps * self.chunk_s if self.prompt is not None else 0.0
        elif self.prompt is not None:
            self.left_s -= passed_s

    def next_s(self) -> float | None:
        """Return when something ends here, as far as is known now."""
        found: float | None = None
        step_s = self.step_s() if self.ends else 0.0
        if self.prompt is not None:
            found = self.at_s + (self.left_s / self.chunk_s * step_s if self.ends else self.left_s)
        if self.ends:
            end_s = self.at_s + (self.ends[0][0] - self.clock) * step_s
            found = end_s if found is None or end_s < found else found
        return found


class _Wires:
    """As `simulator.handoff.Wires`, a prompt at once: a worker's KV goes out one prompt after the other and comes in
    so, in the order in which they were begun; the slower of both ends counts. The first to come takes the way in that
    is free first."""

    def __init__(self, out: Rates, into: Rates, receivers: int) -> None:
        self._out_token_s, self._in_token_s = out.wire_token_s, into.wire_token_s
        self._slower_token_s = max(self._out_token_s, self._in_token_s)
        self._in_free_s = [0.0] * receivers

    def send(self, worker: _Worker, tokens: int, computed_tokens: int, seconds: float, now_s: float) -> None:
        """Send a prompt of `tokens`, of which `computed_tokens` are computed from now on, in `seconds`. Sets when all
        of it is there: when the wires have sent it, but not before the last part of its last chunk can be."""
        if not self._slower_token_s:
            worker.arrives_s = now_s + seconds
            return
        chunk_share = worker.chunk_s / seconds
        from_s = now_s + worker.chunk_s / _PARTS
        worker.out_free_s = max(worker.out_free_s, from_s) + tokens * self._out_token_s
        in_s = max(self._in_free_s[0], from_s) + tokens * self._in_token_s
        heapq.heapreplace(self._in_free_s, in_s)
        last_s = computed_tokens * chunk_share / _PARTS * self._slower_token_s
        worker.arrives_s = max(worker.out_free_s, in_s, now_s + seconds + last_s)


class _Replay:
    def __init__(
        self,
        split: RoleSplit,
        recent: Sequence[ObservedRequest],
        rates: Rates,
        decode_rates: Rates,
        load: float,
        is_warm: bool,
    ) -> None:
        times, count = 3 if is_warm else 1, len(recent)
        self._recent, self._rates = list(recent) * times, rates
        self.counted = slice(count, 2 * count) if is_warm else slice(0, count)
        self._left = count
        arrivals = [(one.arrival_s - recent[0].arrival_s) / load for one in recent]
        self.span_s = arrivals[-1] * len(recent) / max(1, len(recent) - 1)
        """From the first of one time to the first of the next: a mean pause follows the last."""
        self._arrivals = [at_s + turn * self.span_s for turn in range(times) for at_s in arrivals]
        mixed = [_Worker(rates) for _ in range(split.mixed)]
        self._computing = [_Worker(rates) for _ in range(split.prefill)] + mixed
        self._decoding = [_Worker(decode_rates) for _ in range(split.decode)] + mixed
        self._mixed = {id(worker) for worker in mixed}
        self._wires = _Wires(rates, decode_rates, len(self._decoding))
        self._senders: dict[int, _Worker] = {}
        self._longest = max(one.prompt_tokens for one in recent)
        self._idle = list(self._computing)
        self._queue: list[tuple[float, int, float]] = []
        self._joining: deque[int] = deque()
        self._due: list[tuple[float, int, int, _Worker | int]] = []
        self._made = 0
        self._first_s = [0.0] * len(self._recent)
        self.ttft_s, self.itl_s = [0.0] * len(self._recent), [0.0] * len(self._recent)
        self.computed_s = self.ended_s = 0.0

    def play(self) -> None:
        arrivals, due, number = self._arrivals, self._due, 0
        while self._left:
            if number < len(arrivals) and (not due or arrivals[number] <= due[0][0]):
                self.ended_s = arrivals[number]
                self._arrive(number)
                number += 1
                continue
            now_s, _, version, what = heapq.heappop(due)
            if isinstance(what, int):
                self.ended_s = now_s
                self._arrived(what, now_s)
            elif version == what.version:
                self.ended_s = now_s
                self._turn(what, now_s)

    def _arrive(self, number: int) -> None:
        """Queue the prompt with all others, in the order that workers' queues have."""
        one, now_s, rates = self._recent[number], self._arrivals[number], self._rates
        start = min(one.cached_tokens, one.prompt_tokens - 1)
        seconds = rates.prefill_step_s + rates.prefill.seconds(
            one.prompt_tokens - start, attended(start, one.prompt_tokens)
        )
        due_s = rates.queue.due_s(arrived_s=now_s, remaining_s=seconds, now_s=now_s)
        heapq.heappush(self._queue, (due_s, number, seconds))
        self._give(now_s)

    def _give(self, now_s: float) -> None:
        """Give prompts to idle workers, the emptiest first."""
        while self._queue and self._idle:
            worker = min(self._idle, key=lambda one: len(one.ends))
            self._idle.remove(worker)
            _, number, seconds = heapq.heappop(self._queue)
            worker.advance(now_s)
            worker.prompt, worker.left_s = number, max(seconds, _EPSILON)
            worker.chunk_s = min(worker.left_s, self._rates.max_step_s)
            self.computed_s += seconds
            one = self._recent[number]
            if one.output_tokens > 1 and id(worker) not in self._mixed:
                computed = one.prompt_tokens - min(one.cached_tokens, one.prompt_tokens - 1)
                self._wires.send(worker, one.prompt_tokens, computed, worker.left_s, now_s)
                worker.kv_tokens += one.prompt_tokens
            self._schedule(worker)

    def _turn(self, worker: _Worker, now_s: float) -> None:
        """Handle the end of something at this worker."""
        worker.advance(now_s)
        has_room = False
        while worker.ends and worker.ends[0][0] <= worker.clock + 1e-6:
            _, number = heapq.heappop(worker.ends)
            self._leave(worker, number, now_s)
            has_room = True
        if worker.prompt is not None and worker.left_s <= _EPSILON:
            number, worker.prompt = worker.prompt, None
            self._computed(worker, number, now_s)
            self._free(worker)
            self._give(now_s)
        if has_room and self._joining:
            self._admit(now_s)
        self._schedule(worker)

    def _computed(self, worker: _Worker, number: int, now_s: float) -> None:
        self._first_s[number] = now_s
        if self._recent[number].output_tokens <= 1:
            self._end(number)
        self.ttft_s[number] = now_s - self._arrivals[number]
        if self._recent[number].output_tokens <= 1:
            return
        if id(worker) in self._mixed:
            self._join(worker, number, now_s)
            return
        self._senders[number] = worker
        self._made += 1
        there_s = max(now_s, worker.arrives_s) + self._rates.handoff_s
        heapq.heappush(self._due, (there_s, self._made, 0, number))

    def _arrived(self, number: int, now_s: float) -> None:
        """Handle the arrival of all KV of a prompt at the other worker."""
        sender = self._senders.pop(number)
        sender.kv_tokens -= self._recent[number].prompt_tokens
        self._joining.append(number)
        self._admit(now_s)
        if sender.is_full:
            self._free(sender)
            self._give(now_s)

    def _free(self, worker: _Worker) -> None:
        """Let it take the next prompt, unless its computed and unsent KV leaves no room for one."""
        held = 0 if id(worker) in self._mixed else worker.kv_tokens
        worker.is_full = held > 0 and held + self._longest > worker.rates.kv_tokens
        if not worker.is_full:
            self._idle.append(worker)

    def _admit(self, now_s: float) -> None:
        """Begin answers at the decode worker with the fewest, in the order in which they came."""
        while self._joining:
            number = self._joining[0]
            needed = self._recent[number].prompt_tokens + self._recent[number].output_tokens
            able = [
                one
                for one in self._decoding
                if len(one.ends) < one.rates.max_sequences
                and (not one.ends or one.kv_tokens + needed <= one.rates.kv_tokens)
            ]
            if not able:
                return
            self._joining.popleft()
            self._join(min(able, key=lambda one: len(one.ends)), number, now_s)

    def _join(self, worker: _Worker, number: int, now_s: float) -> None:
        one = self._recent[number]
        worker.advance(now_s)
        begins = worker.clock if id(worker) in self._mixed else math.ceil(worker.clock - _EPSILON)
        if not worker.ends:
            worker.clock = begins
        heapq.heappush(worker.ends, (begins + one.output_tokens - 1, number))
        worker.context += one.prompt_tokens + one.output_tokens / 2
        worker.kv_tokens += one.prompt_tokens + one.output_tokens
        self._schedule(worker)

    def _leave(self, worker: _Worker, number: int, now_s: float) -> None:
        one = self._recent[number]
        worker.context -= one.prompt_tokens + one.output_tokens / 2
        worker.kv_tokens -= one.prompt_tokens + one.output_tokens
        self.itl_s[number] = (now_s - self._first_s[number]) / (one.output_tokens - 1)
        self._end(number)

    def _end(self, number: int) -> None:
        self._left -= self.counted.start <= number < self.counted.stop

    def _schedule(self, worker: _Worker) -> None:
        worker.version += 1
        next_s = worker.next_s()
        if next_s is not None:
            self._made += 1
            heapq.heappush(self._due, (max(next_s, worker.at_s), self._made, worker.version, worker))
