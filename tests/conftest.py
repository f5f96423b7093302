"""Marks come from the path; every test process keeps to one compute thread, so that parallel parts do not starve; no
test of random input fails because the machine is busy, and clients share what they trust."""

import asyncio
import contextlib
import functools
import gc
import inspect
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

from tandem.core.cpu_level import cpu_level, hold_libraries
from tests.plugins import seeds
from tests.plugins.drawn import Drawn
from tests.plugins.forked_starts import ForkedStarts
from tests.plugins.leftovers import Leftovers
from tests.plugins.levels import Levels
from tests.plugins.memory import Memory
from tests.plugins.order import Order
from tests.plugins.recording import Recorder

assert "torch" not in sys.modules
hold_libraries()
gc.disable()  # until all tests are collected: it would look through all that is imported, again and again

# Processes with another home, such as pods, would compile our C code anew, which takes a minute of CPU time each.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# Fetched models change no test: there is no folder of models, and none can be made.
os.environ["TANDEM_MODELS_DIR"] = f"{os.devnull}/models"

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "first failure", settings.get_profile("any machine"), phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
settings.load_profile("any machine")

# Each client of httpx would read all certificates of this machine anew, which takes longer than most of its requests.
vars(transports)["create_ssl_context"] = functools.cache(httpx.create_ssl_context)

# Five seconds, the default time-out of httpx clients, are little where ten processes start beside.
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(vars(httpx.Timeout(60.0)))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A runner in the background ignores Ctrl-C, and so would every process that a test sends one.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write times and memory of every test, one JSON object a line")
    parser.addoption("--places", action="store_true", help="also record where tests wait; slows them a little")
    parser.addoption("--exec", action="store_true", help="start every process anew, none by a fork of a template")
    parser.addoption("--full", action="store_true", help="run all cases of the tests of which the seed draws some")
    parser.addoption("--repeat", type=int, default=1, metavar="N", help="run every test N times")
    parser.addoption("--seed", type=int, help="the seed of random input and drawn matrices; default: of the commit")


def pytest_configure(config: pytest.Config) -> None:
    seeds.choose(config.getoption("--seed"))
    for plugin in (Order(), Levels(), Memory(), Drawn(is_full=config.getoption("--full"))):
        config.pluginmanager.register(plugin)
    runner = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not runner:
        config.pluginmanager.register(Leftovers())
    if not config.getoption("--exec"):
        config.pluginmanager.register(ForkedStarts())  # last, so that it ends its processes before they are looked for
    if (path := config.getoption("--record")) and (runner or not getattr(config.option, "numprocesses", None)):
        path = f"{path}.{runner}" if runner else path
        config.pluginmanager.register(Recorder(Path(path), has_places=config.getoption("--places")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    level = cpu_level().label
    terminalreporter.write_line(f"seed {seeds.current()} (repeat with --seed={seeds.current()}), CPU level {level}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (times := metafunc.config.getoption("--repeat")) > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(times))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in an event loop of its own; an asynchronous context manager that a fixture returns is
    entered for it, and left after it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            given = {name: pyfuncitem.funcargs[name] for name in names}
            for name, value in given.items():
                if isinstance(value, contextlib._AsyncGeneratorContextManager):
                    given[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**given)

    asyncio.run(run())
    return True


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    gc.unfreeze()
