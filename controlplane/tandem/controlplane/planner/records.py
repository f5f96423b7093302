"""Input, output and rules of the planner. Plain records; times are in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from tandem.core.config import PlannerMode, PlannerSection, SloSection
from tandem.core.errors import ConfigError
from tandem.core.prefill_queue import UNMEASURED, PrefillSpeed, QueueRules
from tandem.core.state_enums import RoleName


@dataclass(frozen=True, slots=True, order=True)
class RoleSplit:
    """Number of workers of each role."""

    prefill: int
    decode: int
    mixed: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def can_serve(self) -> bool:
        """True if any request can be served: by a pair or by a mixed worker; nothing is negative."""
        if min(self.prefill, self.decode, self.mixed) < 0:
            return False
        return self.mixed > 0 or (self.prefill > 0 and self.decode > 0)

    def of(self, role: RoleName) -> int:
        return {RoleName.PREFILL: self.prefill, RoleName.DECODE: self.decode, RoleName.MIXED: self.mixed}[role]

    def flips_to(self, other: RoleSplit) -> int:
        """Return how many workers change their role on the way there; added or removed ones do not count."""
        more = sum(max(0, other.of(role) - self.of(role)) for role in RoleName)
        fewer = sum(max(0, self.of(role) - other.of(role)) for role in RoleName)
        return min(more, fewer)

    def __str__(self) -> str:
        """Such as "5P:3D", "8M" or "2P:1D:1M"."""
        parts = [f"{self.prefill}P:{self.decode}D"] if self.prefill or self.decode or not self.mixed else []
        return ":".join(parts + ([f"{self.mixed}M"] if self.mixed else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRequest:
    """One request of the last minutes. `cached_tokens` of its prompt need not be computed; `slo`: its class."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    slo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one worker is, as measured. All workers are taken to be alike.

    A decode step of b sequences with c tokens of context in all takes `decode_step_s` + b · `decode_sequence_s` +
    c · `decode_context_s`; a worker that does both computes at most `max_step_s` of a prompt in a step. `kv_tokens`:
    what a worker's pool holds. Between the first token and the second are `handoff_s` and what is still on its way of
    `kv_token_bytes` a token, over `link_bytes_per_s` out of every worker and into every one (0 of either = no time).
    """

    prefill: PrefillSpeed = UNMEASURED
    prefill_step_s: float = 0.0
    decode_step_s: float = 0.02
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0
    max_step_s: float = 0.2
    max_sequences: int = 256
    kv_tokens: int = 1 << 40
    kv_token_bytes: int = 0
    link_bytes_per_s: float = 0.0
    handoff_s: float = 0.005
    queue: QueueRules = field(default_factory=QueueRules)

    @property
    def wire_token_s(self) -> float:
        """Return seconds that the KV of a token takes over a link; 0 if that is not known."""
        return self.kv_token_bytes / self.link_bytes_per_s if self.link_bytes_per_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A cluster's last minutes. `split`: the desired one. `recent`: requests that came. `promises`: SLO classes by
    name; a class that is not in it is promised nothing. `is_settled`: the workers are those of `split`, none starts,
    flips, drains or is missing."""

    split: RoleSplit
    recent: Sequence[ObservedRequest]
    rates: Rates
    promises: Mapping[str, SloSection]
    is_settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted service of the requests of the last minutes by a split. `attained`: share that keeps its promises;
    `score`: the same with how near the others come, so that two bad splits can be distinguished. Seconds at the 90th
    percentile. `prefill_busy`: utilization of the workers that compute prompts."""

    split: RoleSplit
    attained: float
    score: float
    goodput_per_s: float
    ttft_p90_s: float
    itl_p90_s: float
    prefill_busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The planner's target and reason. `wanted` is `current` where all stays; `is_due`: no rule delays it any more;
    `is_to_act`: carry it out now; `is_advice`: that is for others, in every mode. `waits_s`: so long nothing is due,
    after the last change.

    `now` and `then` are the forecasts of both (None = nothing was predicted), `considered` those of all examined
    splits.
    """

    at_s: float
    mode: PlannerMode
    current: RoleSplit
    wanted: RoleSplit
    reason: str
    is_due: bool = False
    is_to_act: bool = False
    is_advice: bool = False
    waits_s: float = 0.0
    now: Forecast | None = None
    then: Forecast | None = None
    considered: tuple[Forecast, ...] = ()

    @property
    def flips(self) -> int:
        """Workers that change their role."""
        return self.current.flips_to(self.wanted)

    @property
    def is_change(self) -> bool:
        return self.wanted != self.current


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules for changes by the planner.

    Requests of the last `window_s` count, at most `max_requests`, at least `min_requests`. Each flip of a change has to
    gain `min_gain` of all requests, in `confirmations` decisions in a row, at a load `headroom` times as heavy as seen;
    and to be worth `worth_s` since the first of them: seconds, times the share of requests that it gains. So much is
    gained soon where much is wrong. After any change the split stays for `cool_down_s`. At most `most_at_once` of the
    workers flip in one decision (one always may). `budget`: most workers, 0 = as many as there are. With `is_scaling`
    workers are added where no flip reaches `target`, and taken away where fewer reach it at `spare_headroom`,
    `spare_confirmations` times in a row.
    `is_mixed_allowed`: all-mixed splits are considered too.
    """

    mode: PlannerMode = PlannerMode.OFF
    window_s: float = 60.0
    max_requests: int = 400
    min_requests: int = 30
    min_gain: float = 0.03
    headroom: float = 1.1
    confirmations: int = 2
    worth_s: float = 10.0
    cool_down_s: float = 30.0
    most_at_once: float = 0.25
    budget: int = 0
    target: float = 0.95
    is_scaling: bool = False
    spare_headroom: float = 1.5
    spare_confirmations: int = 10
    is_mixed_allowed: bool = False

    @classmethod
    def configured(cls, section: PlannerSection, most_workers: int = 0) -> Rules:
        """Return the rules of `section`; `most_workers` bounds the budget, too, 0 = nothing does."""
        bounds = [bound for bound in (section.budget, most_workers) if bound]
        same = {one.name: getattr(section, one.name) for one in fields(section) if one.name in _CONFIGURED}
        return cls(**{**same, "budget": min(bounds, default=0)})

    def __post_init__(self) -> None:
        for name in ("window_s", "max_requests", "headroom", "confirmations", "spare_headroom", "spare_confirmations"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of the planner is {getattr(self, name)}", why="it must be above 0")
        for name in ("min_gain", "target", "most_at_once"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} of the planner is {getattr(self, name)}", why="it is a share from 0 to 1")
        for name in ("min_requests", "worth_s", "cool_down_s", "budget"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} of the planner is {getattr(self, name)}", why="it must be 0 or more")


_CONFIGURED = frozenset(one.name for one in fields(Rules))
