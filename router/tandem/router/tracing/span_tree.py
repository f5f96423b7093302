"""The tree of a call's spans, out of what is known at its end. Pure.

chat MODEL                     the call, from its arrival until the client has everything
├── read                       checks, chat template, tokens
├── wait                       in the router: for room, or for a worker
├── attempt                    at workers; another one follows where it failed or moved
│   ├── queue                  at the worker that computes the prompt
│   ├── prefill
│   ├── transfer               from the first token until the other worker has verified all KV
│   └── decode
└── deliver                    the last tokens, to the client
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tandem.core.errors import STATUS, TandemError
from tandem.router.dispatch.request_trace import RequestTrace
from tandem.router.dispatch.traces import Span, spans
from tandem.router.tracing.calls import AnswerEnd

Value = str | int | float | bool | Sequence[str]
_CUT_SHORT = ("failed", "moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A span below the call's. `failure` "" = it went well."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failure: str = ""
    branches: Sequence[Branch] = ()


def branches(answer: AnswerEnd) -> list[Branch]:
    """Branches of the call's time, from `read_s` on; of several prompts, side by side."""
    if not answer.traces:
        return [Branch(name="wait", start_s=answer.read_s, end_s=answer.ended_s)]
    found = [branch for trace in answer.traces for branch in _of_request(trace, answer)]
    over_s = max(_end(trace, answer) for trace in answer.traces)
    if answer.ended_s > over_s:
        found.append(Branch(name="deliver", start_s=over_s, end_s=answer.ended_s))
    return found


def call_attributes(answer: AnswerEnd) -> dict[str, Value]:
    """Attributes of the call's own span: its request and its result, by the GenAI conventions and under `tandem.`."""
    work = answer.works[0]
    sampling, terms = work.sampling, work.terms
    found: dict[str, Value] = {
        "gen_ai.request.model": answer.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.response.id": answer.id,
        "gen_ai.response.model": work.model,
        "gen_ai.usage.input_tokens": answer.input_tokens,
        "gen_ai.usage.output_tokens": answer.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": answer.cached_tokens,
        "tandem.prompts": len(answer.works),
        "tandem.is_background": terms.is_background,
    }
    if sampling.n > 1:
        found["gen_ai.request.choice.count"] = sampling.n
    if answer.finish_reasons:
        found["gen_ai.response.finish_reasons"] = tuple(answer.finish_reasons)
    if answer.first_token_s and work.arrived_s is not None:
        found["tandem.time_to_first_token_s"] = answer.first_token_s - work.arrived_s
    if terms.slo:
        found["tandem.slo"] = terms.slo
    return found | error_attributes(answer.error)


def error_attributes(error: TandemError | None) -> dict[str, str]:
    """Its code alone: the message may repeat what the client sent."""
    return {} if error is None else {"error.type": error.code}


def is_fault(error: TandemError) -> bool:
    """True if the cluster is to blame, and not the client."""
    return STATUS[error.code][0] >= 500


def _of_request(trace: RequestTrace, answer: AnswerEnd) -> Iterator[Branch]:
    parts = groupby(spans(trace, _end(trace, answer)), key=lambda span: (span.name == "wait", span.attempt))
    for (is_wait, attempt), group in parts:
        found = list(group)
        start_s, end_s = max(found[0].start_s, answer.read_s), found[-1].end_s
        if not is_wait:
            yield _attempt(trace, attempt, found)
        elif end_s > start_s:
            yield Branch(name="wait", start_s=start_s, end_s=end_s, attributes={"tandem.request.id": trace.request})


def _attempt(trace: RequestTrace, attempt: int, found: Sequence[Span]) -> Branch:
    moments = [moment for moment in trace.moments if moment.attempt == attempt]
    ended = next((moment for moment in moments if moment.what in _CUT_SHORT), None)
    is_last = attempt == trace.moments[-1].attempt
    attributes: dict[str, Value] = {
        "tandem.request.id": trace.request,
        "tandem.attempt": attempt,
        "tandem.worker.decode": moments[0].decode,
    }
    if moments[0].prefill:
        attributes["tandem.worker.prefill"] = moments[0].prefill
    if is_last:
        attributes["tandem.plan.reason"] = trace.reason
    if ended is not None:
        attributes |= {"tandem.attempt.outcome": ended.what, "tandem.attempt.why": ended.why}
    return Branch(
        name="attempt",
        start_s=found[0].start_s,
        end_s=found[-1].end_s,
        attributes=attributes,
        failure=ended.why if ended is not None and ended.what == "failed" else "",
        branches=[_part(span, trace.handoff if is_last else None) for span in found],
    )


def _part(span: Span, handoff: Mapping[str, float] | None) -> Branch:
    attributes: dict[str, Value] = {"tandem.worker": span.worker}
    if span.name == "transfer" and handoff is not None:
        attributes |= {f"tandem.handoff.{name}": seconds for name, seconds in handoff.items()}
    return Branch(name=span.name, start_s=span.start_s, end_s=span.end_s, attributes=attributes)


def _end(trace: RequestTrace, answer: AnswerEnd) -> float:
    return answer.ended_s if trace.ended_s is None else trace.ended_s
