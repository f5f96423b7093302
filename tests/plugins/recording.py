"""Record where the time of a test run goes: per test and per fixture wall time, CPU time of this process and of its
children, resident memory. `pytest --record FILE` turns it on; with `--places`, also where the main thread stood.

One JSON object a line: `{"test": …}` for each test and `{"fixture": …}` for each fixture that was set up. Times are in
seconds, memory in MiB. `tools/test_times.py` makes the tables of docs/testing.md from such files.
"""

import gc
import json
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil
import pytest

from tests.plugins.memory import resident_mib

SAMPLE_EVERY_S = 0.02
ROOT = str(Path(__file__).resolve().parents[2])
MOST_PLACES = 3


class Recorder:
    """A pytest plugin that writes one line for each test and fixture to `path`; the newest run replaces the file."""

    def __init__(self, path: Path, *, has_places: bool = False) -> None:
        self._has_places = has_places
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("w")
        self._places: Counter[str] = Counter()
        self._outcome = ""
        self._stop = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._sampler = threading.Thread(target=self._sample, name="test-recorder", daemon=True)

    def pytest_sessionstart(self) -> None:
        if self._has_places:
            self._sampler.start()

    def pytest_sessionfinish(self) -> None:
        self._stop.set()
        if self._has_places:
            self._sampler.join()
        self._file.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
        begun_s = time.monotonic()
        result = yield
        took_s = time.monotonic() - begun_s
        if took_s >= SAMPLE_EVERY_S:
            where = request.node.nodeid
            self._write(fixture=fixturedef.argname, scope=fixturedef.scope, where=where, wall_s=round(took_s, 3))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._places.clear()
        self._outcome = "passed"
        begun_s, own_s, children_s = time.monotonic(), time.process_time(), cpu_of_children_s()
        result = yield
        took_s = time.monotonic() - begun_s
        places = {place: round(count * SAMPLE_EVERY_S, 2) for place, count in self._places.most_common(MOST_PLACES)}
        self._write(
            test=item.nodeid, outcome=self._outcome, wall_s=round(took_s, 3),
            cpu_s=round(time.process_time() - own_s, 3),
            children_cpu_s=round(max(0.0, cpu_of_children_s() - children_s), 3), rss_mib=resident_mib(), places=places,
        )  # fmt: skip
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._outcome = report.outcome

    def _write(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            # A collection inside `_current_frames` would wait for a lock that CPython 3.11 holds there.
            was_enabled = gc.isenabled()
            gc.disable()
            frame = sys._current_frames().get(self._main)
            if was_enabled:
                gc.enable()
            if frame is not None:
                self._places[place_of(frame)] += 1


def place_of(frame: FrameType | None) -> str:
    """The innermost line of this project in a stack, as `file:function`."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and "/.venv/" not in name and not name.endswith(("recording.py", "conftest.py")):
            return f"{name.removeprefix(ROOT + '/')}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


def cpu_of_children_s() -> float:
    """CPU seconds of all children, those that ended and those that run. Descendants that another process waited for are
    counted while they run alone."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True) if has_children() else ():
        with suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def has_children() -> bool:
    """Without a look at every process of the machine."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that just ended
            if (task / "children").read_text():
                return True
    return False
