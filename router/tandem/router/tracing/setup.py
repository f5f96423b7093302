"""Tracing as configured: none, and nothing imported for it, or OpenTelemetry's."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tandem.core.clock import Clock
from tandem.core.config import RouterConfig
from tandem.core.errors import StartupError
from tandem.core.urls import redacted
from tandem.router.tracing.calls import Tracing
from tandem.router.tracing.settings import tracing_settings
from tandem.router.version import version


def open_tracing(config: RouterConfig, variables: Mapping[str, str], clock: Clock) -> Tracing | None:
    """None = it is off. StartupError when it cannot be had."""
    settings = tracing_settings(config.tracing, variables)
    if settings is None:
        return None
    try:
        from tandem.router.tracing.otel import make_tracing
    except ImportError as error:
        raise StartupError(
            f"traces cannot be sent to {redacted(settings.url)}", why=f"{error.name} is not installed",
            todo="install tandem-serve with the extra otel, or leave tracing off",
        ) from error  # fmt: skip
    resource = {
        "service.name": "tandem-router",
        "service.namespace": config.cluster,
        "service.instance.id": config.router_id,
        "service.version": version(),
    }
    return make_tracing(settings, resource, clock, time.time_ns)
