"""Destination of traces: the configuration, the environment, and values that neither may have."""

from __future__ import annotations

import pytest
from opentelemetry.util.re import parse_env_headers

from tandem.core.config import TracingSection
from tandem.core.errors import ConfigError
from tandem.router.tracing.settings import TracingSettings, check_endpoint, tracing_settings

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
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT is no URL"),
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
    with pytest.raises(ConfigError, match=f"{name} holds no headers") as refused:
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
    with pytest.raises(ConfigError, match="is no URL of a receiver"):
        check_endpoint("tracing.endpoint", url)


@pytest.mark.parametrize("url", ["http://me:pass@c:4318", "http://me@c", "http://c/?key=pass"])
def test_no_key_stands_in_a_url_nor_in_the_complaint(url: str) -> None:
    with pytest.raises(ConfigError, match="more than an address") as refused:
        check_endpoint("tracing.endpoint", url)
    assert "pass" not in refused.value.message.replace("password", "")
