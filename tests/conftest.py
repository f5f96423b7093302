"""Marks come from the path; every test process keeps to one compute thread, so that parallel parts do not starve; no
test of random input fails because the machine is busy, and clients share what they trust."""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import httpx
import httpx._transports.default as transports
import pytest
from hypothesis import HealthCheck, Phase, settings

from tandem.core.cpu_level import hold_libraries

assert "torch" not in sys.modules
hold_libraries()

TESTS = Path(__file__).resolve().parent
KINDS = ("unit", "integration", "e2e", "chaos", "gpu")
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "first failure", settings.get_profile("any machine"), phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
settings.load_profile("any machine")

# Each client of httpx would read all certificates of this machine anew, which takes longer than most of its requests.
vars(transports)["create_ssl_context"] = functools.cache(httpx.create_ssl_context)

# Five seconds, which is what clients of httpx wait unless they are told, are little where ten processes start beside.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(vars(httpx.Timeout(60.0)))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A runner in the background ignores Ctrl-C, and so would every process that a test sends one.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write times and memory of every test, one JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--record"):
        from tests.recording import Recorder

        config.pluginmanager.register(Recorder(Path(path)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if kind in KINDS:
            item.add_marker(getattr(pytest.mark, kind))
        if kind == "gpu" and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_collection_finish() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
