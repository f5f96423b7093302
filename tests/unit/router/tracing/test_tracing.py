"""Test tracing: settings, start and the tree of a call's spans."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.util.re import parse_env_headers

from tandem.core.config import TracingSection
from tandem.core.errors import CancelledError, ConfigError, DeadlineError, InvalidRequestError, TandemError
from tandem.core.ids import RequestId
from tandem.core.sampling import SamplingParams
from tandem.router.admission.slo_classes import SloTerms
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.dispatch.request_trace import Moment, RequestTrace
from tandem.router.tracing.calls import AnswerEnd, context_of
from tandem.router.tracing.settings import TracingSettings, check_endpoint, tracing_settings
from tandem.router.tracing.span_tree import Branch, branches, call_attributes, error_attributes, is_fault

OFF = TracingSection()
ON = TracingSection(endpoint="http://collector:4318", sample_ratio=0.25)


@pytest.mark.parametrize(
    ("section", "variables", "url"),
    [
        (OFF, {}, ""),
        (ON, {}, "http://collector:4318/v1/traces"),
        (TracingSection(endpoint="https://c/base/"), {}, "https://c/base/v1/traces"),
        (OFF, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318"}, "http://e:4318/v1/traces"),
        (ON, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318/"}, "http://e:4318/v1/traces"),
        (ON, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e:1/as/given"}, "http://e:1/as/given"),
        (ON, {"OTEL_SDK_DISABLED": "True"}, ""),
        (ON, {"OTEL_TRACES_EXPORTER": "none"}, ""),
        (ON, {"OTEL_TRACES_EXPORTER": "otlp"}, "http://collector:4318/v1/traces"),
        (OFF, {"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4318/v1/traces"),
        (OFF, {"OTEL_TRACES_EXPORTER": "zipkin"}, ""),
        (ON, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://collector:4318/v1/traces"),
        (
            ON,
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "http://collector:4318/v1/traces",
        ),
    ],
)
def test_where_spans_go(section: TracingSection, variables: dict[str, str], url: str) -> None:
    found = tracing_settings(section, variables)
    assert (found.url if found is not None else "") == url


def test_the_environment_s_sampler_wins() -> None:
    assert tracing_settings(ON, {}) == TracingSettings(url="http://collector:4318/v1/traces", sample_ratio=0.25)
    found = tracing_settings(ON, {"OTEL_TRACES_SAMPLER": "always_off"})
    assert found is not None
    assert found.sample_ratio is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT is not the URL"),
    ],
)
def test_what_cannot_be_done_is_said(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tracing_settings(ON, variables)


@pytest.mark.parametrize(
    "text", ["authorization Bearer planted", "a=b,planted", "a=plan;ted", "=planted", "a=b,,c d=planted", "ä=planted"]
)
@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"])
def test_headers_that_are_none_are_refused_and_not_repeated(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must hold headers") as refused:
        tracing_settings(ON, {name: text})
    assert "plan" not in refused.value.message
    assert tracing_settings(OFF, {name: text}) is None, "nobody reads them"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a=b", ["a"]),
        (" Authorization = Bearer key , x-b=%20==,", ["authorization", "x-b"]),
        ("api-key=a:b/c?d", ["api-key"]),
    ],
)
def test_headers_are_taken_that_the_sdk_takes(text: str, names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert tracing_settings(ON, {"OTEL_EXPORTER_OTLP_HEADERS": text}) is not None
    assert sorted(parse_env_headers(text, liberal=True)) == names
    assert caplog.records == []


@pytest.mark.parametrize(
    "url", ["collector", "ftp://c", "http://", "http://c:99999", "http://c:x", "http://[::1", "//c"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a receiver"):
        check_endpoint("tracing.endpoint", url)


@pytest.mark.parametrize("url", ["http://me:pass@c:4318", "http://me@c", "http://c/?key=pass"])
def test_no_key_stands_in_a_url_nor_in_the_complaint(url: str) -> None:
    with pytest.raises(ConfigError, match="more than an address") as refused:
        check_endpoint("tracing.endpoint", url)
    assert "pass" not in refused.value.message.replace("password", "")


PROGRAM = """
import sys
sys.modules["opentelemetry.sdk"] = sys.modules["opentelemetry.exporter"] = None  # whoever imports one fails
import tandem.router.__main__
from tandem.core.clock import MonotonicClock
from tandem.core.config import RouterConfig, TracingSection
from tandem.core.errors import StartupError
from tandem.router.tracing.calls import open_tracing
def config(**tracing):
    return RouterConfig(cluster="c", router_id="r", models=(), redis_url="", secret_file="", admin_key_file="",
                        ready_file="", tracing=TracingSection(**tracing))
assert open_tracing(config(), {}, MonotonicClock()) is None
try:
    open_tracing(config(endpoint="http://c:4318"), {}, MonotonicClock())
except StartupError as error:
    print(error.message)
"""


@pytest.mark.slow
def test_nothing_is_imported_while_it_is_off_and_what_is_missing_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "traces cannot be sent to http://c:4318/v1/traces: opentelemetry.exporter.otlp is not installed" in done.stdout
    )
    assert "Install tandem-serve with the extra otel" in done.stdout


HANDOFF = {"ticket_wait_s": 0.25, "overhead_s": 0.5}
CROSSED = [("sent", 1.0), ("queued", 1.1), ("prefill", 2.0), ("first_token", 3.0), ("transfer", 3.1), ("decode", 4.0)]


def moment(what: str, at_s: float, attempt: int = 1, why: str = "") -> Moment:
    return Moment(attempt, what, at_s, "p0", "d0", why)


def trace(*moments: Moment, request: str = "r", ended_s: float | None = 9.0) -> RequestTrace:
    return RequestTrace(
        request=request, model="m", outcome="finished", error="", reason="least", arrived_s=0.0, ended_s=ended_s,
        prompt_tokens=7, output_tokens=3, cached_tokens=None, constraint=None, handoff=HANDOFF, moments=moments,
    )  # fmt: skip


def answer(*traces: RequestTrace, error: TandemError | None = None, ended_s: float = 10.0, **more: Any) -> AnswerEnd:
    sampling = SamplingParams(max_tokens=5, temperature=0.5, n=more.pop("n", 1), seed=1)
    work = GenerationRequest(
        prompt=[1, 2], sampling=sampling, timeout_s=60.0, model="m", arrived_s=0.0, terms=SloTerms(slo="fast")
    )
    return AnswerEnd(
        id=RequestId("r"), model="tiny", works=[work], traces=traces, read_s=0.5, first_token_s=3.0, ended_s=ended_s,
        input_tokens=2, output_tokens=3, cached_tokens=1, finish_reasons=["stop"], error=error,
    )  # fmt: skip


def shown(found: Sequence[Branch]) -> list[tuple[str, float, float]]:
    return [(one.name, one.start_s, one.end_s) for one in found]


def leaves(found: Sequence[Branch]) -> list[Branch]:
    return [leaf for one in found for leaf in (leaves(one.branches) if one.branches else [one])]


def test_one_that_crossed() -> None:
    wait, attempt, deliver = branches(answer(trace(*(moment(what, at_s) for what, at_s in CROSSED))))
    assert shown([wait, attempt, deliver]) == [("wait", 0.5, 1.0), ("attempt", 1.0, 9.0), ("deliver", 9.0, 10.0)]
    assert shown(attempt.branches) == [
        ("queue", 1.0, 2.0), ("prefill", 2.0, 3.0), ("transfer", 3.0, 4.0), ("decode", 4.0, 9.0),
    ]  # fmt: skip
    assert attempt.attributes == {
        "tandem.request.id": "r", "tandem.attempt": 1, "tandem.worker.prefill": "p0", "tandem.worker.decode": "d0",
        "tandem.plan.reason": "least",
    }  # fmt: skip
    assert [one.attributes["tandem.worker"] for one in attempt.branches] == ["p0", "p0", "p0 → d0", "d0"]
    assert attempt.branches[2].attributes["tandem.handoff.overhead_s"] == 0.5
    assert not attempt.failure


def test_an_attempt_that_failed_says_why_and_the_next_one_follows() -> None:
    moments = [
        moment("sent", 1.0), moment("prefill", 2.0), moment("failed", 3.0, why="p0 was lost"), moment("sent", 4.0, 2),
        moment("decode", 5.0, 2),
    ]  # fmt: skip
    found = branches(answer(trace(*moments)))
    assert [one.name for one in found] == ["wait", "attempt", "wait", "attempt", "deliver"]
    first, second = found[1], found[3]
    assert first.failure == first.attributes["tandem.attempt.why"] == "p0 was lost"
    assert (second.failure, second.attributes["tandem.attempt"]) == ("", 2)
    assert "tandem.handoff.overhead_s" not in first.branches[-1].attributes, "it is of the attempt that got through"


def test_one_that_moved_did_not_fail() -> None:
    moments = [
        moment("sent", 1.0),
        moment("decode", 2.0),
        moment("moved", 3.0, why="it drains"),
        moment("sent", 3.0, 2),
    ]
    first = branches(answer(trace(*moments)))[1]
    assert (first.failure, first.attributes["tandem.attempt.outcome"]) == ("", "moved")


def test_one_that_was_never_sent_waited() -> None:
    assert shown(branches(answer(error=DeadlineError("late")))) == [("wait", 0.5, 10.0)]
    assert shown(branches(answer(trace(ended_s=10.0), error=DeadlineError("late")))) == [("wait", 0.5, 10.0)]


def test_prompts_of_one_call_stand_side_by_side() -> None:
    two = [trace(moment("sent", 1.0), request=name, ended_s=end) for name, end in (("r-0", 5.0), ("r-1", 9.0))]
    found = branches(answer(*two))
    assert [one.attributes.get("tandem.request.id") for one in found] == ["r-0", "r-0", "r-1", "r-1", None]
    assert shown(found)[-1] == ("deliver", 9.0, 10.0)


AT = st.floats(0.5, 9.0)


@given(st.lists(st.tuples(st.sampled_from([*dict(CROSSED), "failed"]), st.integers(1, 3), AT), max_size=12))
def test_the_leaves_tile_the_call(news: list[tuple[str, int, float]]) -> None:
    news.sort(key=lambda one: (one[1], one[2]))
    at_s = sorted(at_s for _, _, at_s in news)
    moments = [moment(what, at, attempt) for (what, attempt, _), at in zip(news, at_s, strict=True)]
    found = leaves(branches(answer(trace(*moments))))
    assert found[-1].end_s == 10.0
    for one, after in itertools.pairwise(found):
        assert one.start_s < one.end_s or (one.name == "transfer" and one.start_s == one.end_s)
        assert one.end_s <= after.start_s or one.end_s == pytest.approx(after.start_s)
    assert sum(one.end_s - one.start_s for one in found) == pytest.approx(10.0 - found[0].start_s)


def test_the_call_says_what_was_asked_and_what_came_of_it() -> None:
    assert call_attributes(answer(trace(), n=2)) == {
        "gen_ai.request.model": "tiny", "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0, "gen_ai.request.choice.count": 2, "gen_ai.response.id": "r",
        "gen_ai.response.model": "m", "gen_ai.response.finish_reasons": ("stop",), "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 1, "tandem.prompts": 1,
        "tandem.is_background": False, "tandem.slo": "fast", "tandem.time_to_first_token_s": 3.0,
    }  # fmt: skip


def test_of_an_error_the_code_alone_is_told() -> None:
    assert error_attributes(InvalidRequestError("the prompt is 'my secret'")) == {"error.type": "invalid_request"}
    assert not is_fault(CancelledError("gone"))
    assert not is_fault(InvalidRequestError("wrong"))
    assert is_fault(DeadlineError("late"))


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([("authorization", "key"), ("traceparent", "a"), ("tracestate", "b"), ("tracestate", "c")],
         {"traceparent": ["a"], "tracestate": ["b", "c"]}),
        ([("traceparent", "a"), ("traceparent", "b")], {}),
        ([("tracestate", "b"), ("baggage", "x=y")], {}),
    ],
)  # fmt: skip
def test_of_headers_a_trace_s_context_alone_is_taken(
    headers: list[tuple[str, str]], found: dict[str, list[str]]
) -> None:
    assert context_of(headers) == found
