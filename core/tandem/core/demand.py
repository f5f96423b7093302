"""Report of a router to a planner: demand of the last minutes, and the speeds that its workers report.

Lengths and times, never content. Its JSON text is bounded, and read back with every type checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tandem.core.config import SloSection
from tandem.core.desired import MAX_WORKERS
from tandem.core.ids import RouterId, WorkerId
from tandem.core.prefill_queue import UNMEASURED, PrefillSpeed
from tandem.core.state_enums import RoleName

MAX_ASKED: Final = 400
"""Most requests in one router's report: as many as a planner looks at."""
MAX_CLASSES: Final = 256
MAX_BYTES: Final = 1 << 20
_MAX_NAME = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSample:
    """A request that came `age_s` ago, served or not. `output_tokens`: of each of its `choices`, so far if it has not
    ended."""

    age_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    choices: int = 1
    has_ended: bool = False
    slo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker as a router sees it. Speeds are 0 where they were not measured; `kv_tokens`: tokens that its pool holds,
    `kv_token_bytes` each."""

    worker: WorkerId
    role: RoleName
    takes_work: bool = True
    prefill_speed: PrefillSpeed = UNMEASURED
    decoding_sequences: int = 0
    decode_step_s: float = 0.0
    decode_sequence_s: float = 0.0
    in_flight: int = 0
    unique_prefix_bytes: int = 0
    kv_tokens: int = 0
    kv_token_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Demand as one router saw it. `promises`: its SLO classes; `link_bytes_per_s`: median of the measured links from
    workers that compute prompts to others that generate, 0 = none was measured."""

    asked: tuple[DemandSample, ...] = ()
    workers: tuple[WorkerSeen, ...] = ()
    promises: Mapping[str, SloSection] = field(default_factory=dict)
    link_bytes_per_s: float = 0.0

    def to_json(self) -> str:
        """One line: the latest MAX_ASKED requests, rows without names of fields."""
        latest = sorted(self.asked, key=lambda one: one.age_s)[:MAX_ASKED]
        body = {
            "asked": [
                [round(one.age_s, 3), one.prompt_tokens, one.output_tokens, one.cached_tokens, one.choices,
                 one.has_ended, one.slo]
                for one in latest
            ],
            "workers": [
                [one.worker, one.role.value, one.takes_work, one.prefill_speed.tokens_per_s,
                 one.prefill_speed.context_s, one.decoding_sequences, one.decode_step_s, one.decode_sequence_s,
                 one.in_flight, one.unique_prefix_bytes, one.kv_tokens, one.kv_token_bytes]
                for one in self.workers[:MAX_WORKERS]
            ],
            "promises": {
                name: [one.ttft_s, one.itl_s] for name, one in sorted(self.promises.items())[:MAX_CLASSES]
            },
            "link_bytes_per_s": self.link_bytes_per_s,
        }  # fmt: skip
        return json.dumps(body, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Demand:
        """Read a text that `to_json` wrote; ValueError if it is anything else, or too large."""
        if len(text) > MAX_BYTES:
            raise ValueError(f"{len(text)} bytes are more than {MAX_BYTES}")
        raw = json.loads(text)
        try:
            asked, workers, promises = raw["asked"], raw["workers"], raw["promises"]
            if len(asked) > MAX_ASKED or len(workers) > MAX_WORKERS or len(promises) > MAX_CLASSES:
                raise ValueError("it has too many rows")
            return cls(
                asked=tuple(_asked(row) for row in asked),
                workers=tuple(_worker(row) for row in workers),
                promises={_name(name): _promise(row) for name, row in promises.items()},
                link_bytes_per_s=_seconds(raw["link_bytes_per_s"]),
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDemand:
    """A router's report, and its age."""

    router: RouterId
    age_s: float
    demand: Demand


def _asked(row: Any) -> DemandSample:
    age_s, prompt_tokens, output_tokens, cached_tokens, choices, has_ended, slo = row
    return DemandSample(
        age_s=_seconds(age_s),
        prompt_tokens=_count(prompt_tokens),
        output_tokens=_count(output_tokens),
        cached_tokens=_count(cached_tokens),
        choices=_count(choices),
        has_ended=_flag(has_ended),
        slo=_name(slo),
    )


def _worker(row: Any) -> WorkerSeen:
    (worker, role, takes_work, tokens_per_s, context_s, decoding, step_s, sequence_s, in_flight, unique_bytes,
     kv_tokens, kv_token_bytes) = row  # fmt: skip
    return WorkerSeen(
        worker=WorkerId(_name(worker)),
        role=RoleName(role),
        takes_work=_flag(takes_work),
        prefill_speed=PrefillSpeed(tokens_per_s=_seconds(tokens_per_s), context_s=_seconds(context_s)),
        decoding_sequences=_count(decoding),
        decode_step_s=_seconds(step_s),
        decode_sequence_s=_seconds(sequence_s),
        in_flight=_count(in_flight),
        unique_prefix_bytes=_count(unique_bytes),
        kv_tokens=_count(kv_tokens),
        kv_token_bytes=_count(kv_token_bytes),
    )


def _promise(row: Any) -> SloSection:
    ttft_s, itl_s = row
    return SloSection(ttft_s=_seconds(ttft_s), itl_s=_seconds(itl_s))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:  # a bool is no int here
        raise ValueError(f"{str(value)[:80]!r} is not a count")
    return value


def _seconds(value: object) -> float:
    """Seconds or a speed: a number that is neither negative nor infinite."""
    if type(value) not in (int, float) or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise ValueError(f"{str(value)[:80]!r} is not a time")
    return float(value)  # type: ignore[arg-type]


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{str(value)[:80]!r} is neither true nor false")
    return value


def _name(value: object) -> str:
    if type(value) is not str or len(value) > _MAX_NAME:
        raise ValueError(f"{str(value)[:80]!r} is not a name")
    return value
