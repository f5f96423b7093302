"""Marks by folder, and what the levels of tests may do: a unit test starts no process unless it is marked `slow`."""

import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
KINDS = ("unit", "integration", "e2e", "chaos", "gpu")
_EVENTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system")
_ALLOWED = ("cc", "gcc", "clang", "git")
"""Compilers, which the product starts at the first use of C code on a machine, and reading a commit."""


class Levels:
    """Adds the marks, and fails a quick unit test in which a process is started."""

    def __init__(self) -> None:
        self._is_quick = False
        sys.addaudithook(self._refuse_processes)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            kind = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
            if kind in KINDS:
                item.add_marker(getattr(pytest.mark, kind))
            if kind == "gpu" and not _has_cuda():
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._is_quick = item.get_closest_marker("unit") is not None and item.get_closest_marker("slow") is None

    def pytest_runtest_teardown(self) -> None:
        self._is_quick = False

    def _refuse_processes(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_quick and event in _EVENTS and Path(str(arguments[0] if arguments else "")).name not in _ALLOWED:
            self._is_quick = False
            pytest.fail(f"a unit test starts a process ({event} {arguments[:2]}): mark it with pytest.mark.slow")


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
