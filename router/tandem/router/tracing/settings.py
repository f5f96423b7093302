"""Settings of tracing: `[tracing]` of the configuration, and the variables that OpenTelemetry defines, which win."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.core.config import TracingSection
from tandem.core.errors import ConfigError

_PATH = "/v1/traces"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_HEADER = re.compile(r"[!#-'*+\-.0-9A-Z^-z|~]+[ \t]*=[ \t]*[ !#-+\--:<-\[\]-~]*")
_PROTOCOL = "http/protobuf"
_DEFAULT_ENDPOINT = "http://localhost:4318"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """`url`: where spans are posted. `sample_ratio` None = that of OTEL_TRACES_SAMPLER."""

    url: str
    sample_ratio: float | None


def tracing_settings(section: TracingSection, variables: Mapping[str, str]) -> TracingSettings | None:
    """None = no traces. Raises ConfigError for what cannot be done. The other variables of OpenTelemetry (headers,
    certificates, time limits, sizes of the queue, attributes of the resource) are read by its own parts."""
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = variables.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter == "none":
        return None
    url = _url(section, variables, is_wanted=exporter == "otlp")
    if not url:
        return None
    if exporter not in ("", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter!r}", todo="use otlp or none")
    _check_protocol(variables)
    for name in _HEADERS:
        check_headers(name, variables.get(name, ""))
    ratio = None if variables.get("OTEL_TRACES_SAMPLER") else section.sample_ratio
    return TracingSettings(url=url, sample_ratio=ratio)


def check_endpoint(name: str, url: str) -> None:
    """ConfigError when the setting `name` is not the URL of a receiver."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(f"{name} is not the URL of a receiver", todo=f"write one such as {_DEFAULT_ENDPOINT}")
    if parts.username is not None or parts.query:
        why = "it is shown in logs, and so would be the password or key in it"
        raise ConfigError(f"{name} holds more than an address", why=why, todo="put it into OTEL_EXPORTER_OTLP_HEADERS")


def check_headers(name: str, text: str) -> None:
    """ConfigError when what `name` holds are no headers, `name=value,…`. The SDK would log what it cannot read, and a
    key with it."""
    for number, part in enumerate(text.split(","), 1):
        if part.strip() and not _HEADER.fullmatch(part.strip()):
            todo = "write name=value,name=value, with values as in a URL (%20 for a space)"
            raise ConfigError(f"{name} must hold headers", why=f"part {number} is not a header", todo=todo)


def _url(section: TracingSection, variables: Mapping[str, str], *, is_wanted: bool) -> str:
    whole, base = (variables.get(name, "").strip() for name in _ENDPOINTS)
    if whole:
        check_endpoint(_ENDPOINTS[0], whole)
        return whole
    name = _ENDPOINTS[1] if base else "tracing.endpoint"
    base = base or section.endpoint or (_DEFAULT_ENDPOINT if is_wanted else "")
    if not base:
        return ""
    check_endpoint(name, base)
    return base.rstrip("/") + _PATH


def _check_protocol(variables: Mapping[str, str]) -> None:
    for name in _PROTOCOLS:
        protocol = variables.get(name, "").strip()
        if protocol and protocol != _PROTOCOL:
            todo = f"use {_PROTOCOL}, at the receiver's port for it, mostly 4318"
            raise ConfigError(f"{name} is {protocol!r}", why="traces go over HTTP", todo=todo)
        if protocol:
            return
