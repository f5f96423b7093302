"""Tracing that is off costs nothing, and one that cannot be had ends the start."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["opentelemetry.sdk"] = sys.modules["opentelemetry.exporter"] = None  # whoever imports one fails
import tandem.router.__main__
from tandem.core.clock import MonotonicClock
from tandem.core.config import RouterConfig, TracingSection
from tandem.core.errors import StartupError
from tandem.router.tracing.setup import open_tracing
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
