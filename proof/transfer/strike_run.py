"""Strikes in rounds: every pair gets its workers, then all are struck together, so that starts disturb no clock.

One strike: requests up to the moment, the signal, the survivor's knowledge and its time, and the way back.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from proof.transfer.asks import Ask, draw_prompt
from proof.transfer.partner import Partner
from proof.transfer.strikes import GROUP, House, Strike, draw_strike
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.embedded_redis import PrivateRedis

KNOWN_WITHIN_S = {False: 1.0, True: 3.0}
"""Bound on the time until it is known: of a death, of a stop."""
BASELINE_WITHIN_S = 5.0
MOMENT_WITHIN_S = 20.0
REPLAY_WITHIN_S = 20.0
MAX_TOKENS = 24
Result = dict[str, Any]


@dataclass
class Outcome:
    """Seconds are after the signal. `survivor_s`: when the survivor had given up all that it shared with the victim;
    None if it shared nothing. `router_s`: when the victim's stream had ended or fallen silent for a lease.

    `late`: limits of time that were exceeded; `violations`: promises that were broken.
    """

    state: str = ""
    shared: int = 0
    survivor_s: float | None = None
    router_s: float | None = None
    baseline_s: float | None = None
    requests: int = 0
    replayed: int = 0
    lag_s: float = 0.0
    late: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class StrikeRun:
    """One strike in one house; `spare` takes the victim's place."""

    def __init__(self, house: House, strike: Strike, spare: Partner) -> None:
        self._house, self._strike, self._spare = house, strike, spare
        self._rng = random.Random(strike.seed)
        self._heard = asyncio.Event()
        self.outcome = Outcome()
        self._victim = house.workers[strike.victim]
        self._survivor = house.workers["d" if strike.victim == "p" else "p"]

    async def run(self) -> Outcome:
        self._house.heard = self._heard.set
        self._house.asks.clear()
        try:
            await self._until_the_moment()
            await self._hit()
            await self._watch()
            await self._back_to_baseline()
            await self._replay()
        finally:
            await self._swap()
        self.outcome.requests = len(self._house.asks)
        for ask in self._house.asks.values():
            self.outcome.violations += ask.violations
        return self.outcome

    # ---- before ------------------------------------------------------------------------------------------------------

    def _ask(self, tokens: int, **options: object) -> Ask:
        name = f"{self._strike.name}/r{len(self._house.asks)}"
        return Ask(name, draw_prompt(self._rng, tokens), self._rng.randint(8, MAX_TOKENS), **options)  # type: ignore[arg-type]

    async def _until_the_moment(self) -> None:
        moment, house = self._strike.moment, self._house
        if moment == "queued":  # behind others
            for _ in range(2):
                await house.submit(self._ask(900))
        elif moment == "ticket asked":  # the decode worker is full
            for _ in range(2):
                await house.submit(self._ask(780, leg=w.LEG_FULL))
            await self._wait(lambda: all(("d", "prefill") in ask.phases for ask in house.asks.values()), moment)
        else:
            await house.submit(self._ask(self._rng.randint(20, 300)))
        main = self._ask(self._rng.choice((1400, 700)) if moment == "mid-copy" else self._rng.randint(200, 700))
        await house.submit(main)
        wanted, most_s = {
            "queued": (("p", "queued"), 0.02),
            "ticket asked": (("p", "prefill"), 0.05),
            "pushing": (("p", "prefill"), 0.1),
            "mid-copy": (("p", "prefill"), 0.03),
            "complete": (("p", "transfer"), 0.002),
            "verified": (("d", "decode"), 0.0),
            "decoding": (("d", "decode"), 0.2),
        }[moment]
        await self._wait(lambda: wanted in main.phases or main.ended_s is not None, moment)
        if most_s:
            await asyncio.sleep(most_s * self._strike.delay)  # a random moment inside the state
        self.outcome.state = main.state()

    async def _wait(self, condition: Callable[[], bool], what: str, within_s: float = MOMENT_WITHIN_S) -> bool:
        """Wait until a message makes the condition true."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not condition():
                    self._heard.clear()
                    await self._heard.wait()
                return True
        self.outcome.violations.append(f"within {within_s:g} s: not {what}")
        return False

    # ---- the signal --------------------------------------------------------------------------------------------------

    async def _hit(self) -> None:
        target = self._victim.pids[self._strike.target + 1]
        os.kill(target, signal.SIGSTOP if self._strike.is_stop else signal.SIGKILL)
        self._struck_s = time.monotonic()

    async def _watch(self) -> None:
        """Measure when both sides know. The router cancels nothing before the survivor's time is up: it must know by
        itself."""
        limit_s = KNOWN_WITHIN_S[self._strike.is_stop]
        deadline_s = self._struck_s + limit_s + 1.0
        is_first, looked_s = True, time.monotonic()
        while True:
            report = await self._survivor.audit()
            now_s = time.monotonic()
            self.outcome.lag_s = max(self.outcome.lag_s, now_s - looked_s - 0.02)
            looked_s = now_s
            shared = self._shared(report)
            if is_first:
                self.outcome.shared, is_first = shared, False
            if not shared and self.outcome.shared and self.outcome.survivor_s is None:
                self.outcome.survivor_s = now_s - self._struck_s
            if self._victim.lost_s is not None and self.outcome.router_s is None:
                self.outcome.router_s = self._victim.lost_s - self._struck_s
            is_known = self.outcome.router_s is not None and (not self.outcome.shared or not shared)
            if is_known or now_s > deadline_s:
                break
            await asyncio.sleep(0.02)  # poll interval
        for who, known_s in (("survivor", self.outcome.survivor_s), ("router", self.outcome.router_s)):
            if known_s is None and (who == "router" or self.outcome.shared):
                self.outcome.late.append(f"the {who} knew nothing after {limit_s + 1:g} s")
            elif known_s is not None and known_s > limit_s:
                self.outcome.late.append(f"the {who} knew after {known_s:.2f} s")

    def _shared(self, report: w.AuditReport | None) -> int:
        """Transfers with the victim that the survivor works on; −1 without a report."""
        if report is None:
            return -1
        return sum(claim.peer == self._victim.name for claim in report.claims)

    # ---- after -------------------------------------------------------------------------------------------------------

    async def _back_to_baseline(self) -> None:
        """The router gives up the victim's requests; those that the survivor can end alone it must end."""
        for ask in self._house.asks.values():
            if ask.ended_s is None and not self._is_the_survivors(ask):
                cancel = w.Cancel(request=ask.id, attempt=ask.attempt, reason="its worker was lost")
                await self._survivor.send(cancel=cancel)
        left_s = self._struck_s + BASELINE_WITHIN_S - time.monotonic()
        baseline_s, held = await self._survivor.at_baseline(max(left_s, 0.1))
        if baseline_s is None:
            self.outcome.violations.append(f"{BASELINE_WITHIN_S:g} s after the signal the survivor holds: {held}")
        else:
            took_s = self.outcome.baseline_s = baseline_s - self._struck_s
            if took_s > BASELINE_WITHIN_S:  # its last answer may have been asked for in time and come too late
                self.outcome.late.append(f"the survivor was back to nothing held after {took_s:.2f} s")

    def _is_the_survivors(self, ask: Ask) -> bool:
        """True if the survivor needs no other worker for the rest of it."""
        return self._strike.victim == "p" and (ask.leg == w.LEG_FULL or ("d", "decode") in ask.phases)

    async def _replay(self) -> None:
        """Retry what did not end with the survivor and a fresh partner, and one new request with it."""
        house = self._house
        if self._strike.is_stop and self._strike.wakes:
            with suppress(ProcessLookupError):  # its host may have ended it meanwhile
                os.kill(self._victim.pids[self._strike.target + 1], signal.SIGCONT)
        house.workers[self._strike.victim] = self._spare
        again = [ask for ask in house.asks.values() if not ask.is_whole]
        for ask in again:
            ask.try_again()
        self.outcome.replayed = len(again)
        fresh = self._ask(self._rng.randint(20, 400))
        for ask in [*again, fresh]:
            await house.submit(ask)
        await self._wait(
            lambda: all(ask.is_whole for ask in house.asks.values()), "all requests answered", REPLAY_WITHIN_S
        )
        for ask in house.asks.values():
            if not ask.is_whole:
                said = f"{ask.phases} {ask.failed}"
                self.outcome.violations.append(f"{ask.id}: {len(ask.got)} of {ask.max_tokens} tokens; {said}")
        for worker in (self._survivor, self._spare):
            baseline_s, held = await worker.at_baseline(BASELINE_WITHIN_S)
            if baseline_s is None:
                self.outcome.violations.append(f"after the replay {worker.name} holds: {held}")

    async def _swap(self) -> None:
        self._house.workers[self._strike.victim] = self._spare
        left = await self._victim.end(is_gentle=self._strike.is_stop and self._strike.wakes)
        if left:
            self.outcome.violations.append(f"processes {left} outlived their worker")
        if self.outcome.violations:  # whatever is wrong with the survivor must not spoil the next strike
            await self._house.clear()


async def run_strikes(
    part: str,
    seed: int,
    indices: Sequence[int],
    pairs: int,
    folder: Path,
    on_result: Callable[[int, Result], None],
    is_stopping: Callable[[], bool],
) -> None:
    """Carry them out, `pairs` at a time; strikes of one group happen to one pair of workers."""
    redis = PrivateRedis.start(folder / "redis", "proof-password")
    houses = [House(folder / f"h{number}", redis.url, number) for number in range(pairs)]
    lanes = _lanes(indices, pairs)
    try:
        while any(lanes) and not is_stopping():
            due = [
                (house, draw_strike(seed, part, lane.pop(0))) for house, lane in zip(houses, lanes, strict=True) if lane
            ]
            starting = asyncio.Semaphore(os.cpu_count() or 1)  # it is all CPU
            spares = await asyncio.gather(*(_prepare(house, strike, starting) for house, strike in due))
            load = os.getloadavg()[0]
            jobs = [_strike(house, strike, spare) for (house, strike), spare in zip(due, spares, strict=True)]
            for (_, strike), outcome in zip(due, await asyncio.gather(*jobs), strict=True):
                on_result(int(strike.name.split("/")[1]), _entry(strike, outcome, load))
    finally:
        await asyncio.gather(*(house.clear() for house in houses))
        redis.stop()


def _lanes(indices: Sequence[int], pairs: int) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index in indices:
        groups.setdefault(index // GROUP, []).append(index)
    lanes: list[list[int]] = [[] for _ in range(pairs)]
    for group in groups.values():
        min(lanes, key=len).extend(group)
    return lanes


async def _prepare(house: House, strike: Strike, starting: asyncio.Semaphore) -> Partner | str:
    try:
        async with starting:
            return await house.prepare(strike.ends, strike.victim)
    except (RuntimeError, TimeoutError) as error:
        return str(error)


async def _strike(house: House, strike: Strike, spare: Partner | str) -> Outcome:
    if isinstance(spare, str):
        await house.clear()
        return Outcome(violations=[f"a worker did not start: {spare}"])
    try:
        return await StrikeRun(house, strike, spare).run()
    except Exception:  # noqa: BLE001 - a result, too
        await house.clear()
        return Outcome(violations=[traceback.format_exc()])


def _entry(strike: Strike, outcome: Outcome, load: float) -> Result:
    target = "host" if strike.target < 0 else f"rank {strike.target}"
    ends = strike.ends
    entry = {
        "transport": ends.transport,
        "tp": f"{ends.p_tp}x{ends.d_tp}",
        "moment": strike.moment,
        "target": f"{strike.victim} {target}",
        "load": round(load, 1),
    } | asdict(outcome)
    entry["violations"] = [f"{strike.name} ({entry['target']}, {strike.moment}): {v}" for v in outcome.violations]
    entry["late"] = [f"{strike.name} ({entry['target']}, {strike.moment}): {words}" for words in outcome.late]
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in entry.items()}
