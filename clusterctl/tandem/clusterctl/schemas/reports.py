"""Shapes of documents about chats, settings, checks and loads; kinds.py lists them."""

from __future__ import annotations

from typing import Any, TypedDict

from tandem.clusterctl.doctor.findings import Finding
from tandem.clusterctl.meta.settings import Setting


class ChatUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None
    cached_tokens: int | None


class ChatTimings(TypedDict):
    """As measured by this program, from the moment of asking; tokens a second by the server's clock if it reports
    them."""

    ttft_s: float | None
    total_s: float
    tokens_per_s: float | None


class ChatCall(TypedDict):
    """A call of a tool; `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


class ChatWorkers(TypedDict):
    """The workers that computed the prompt and generated the answer; may be the same."""

    prefill: str
    decode: str


class Chat(TypedDict):
    """`workers` and `handoff` are those of a Tandem cluster; with one worker there is no hand-off."""

    url: str
    id: str
    model: str
    text: str
    reasoning: str
    calls: list[ChatCall]
    finish_reason: str
    usage: ChatUsage | None
    timings: ChatTimings
    workers: ChatWorkers | None
    handoff: dict[str, float] | None


class Doctor(TypedDict):
    errors: int
    warnings: int
    findings: list[Finding]


class Config(TypedDict):
    file: str
    settings: dict[str, Any]
    changed: list[str]


class ConfigCheck(TypedDict):
    file: str
    changed: list[str]
    is_valid: bool


class ConfigKeys(TypedDict):
    settings: list[Setting]


class Spread(TypedDict):
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class TtftByPrompt(TypedDict):
    prompt_tokens: int
    requests: int
    ttft_s: Spread


class FailedRequests(TypedDict):
    error: str
    requests: int


class Attainment(TypedDict):
    ttft_s: float
    itl_s: float
    least_share: float
    share: float
    goodput_requests_per_s: float
    is_met: bool


class Bench(TypedDict):
    url: str
    model: str
    load: str
    seed: int
    requests: int
    failed: int
    errors: list[FailedRequests]
    took_s: float
    offered_requests_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    sent_late_s: Spread | None
    ttft_by_prompt: list[TtftByPrompt]
    slo: Attainment


class Replay(Bench):
    """Of a trace."""


REPORTS = (Chat, Doctor, Bench, Replay, Config, ConfigCheck, ConfigKeys)
