"""Run all tests, side by side: `make test`. With arguments, as in `make test ARGS='--repeat 5 PATH'`, run one pytest.

Two lanes run at the same time. One has `all`: every test, on three processes of pytest-xdist, longest files first. The
other has parts that only compute, one after the other:

- `check`: `make check`; its type checker keeps one core busy for minutes in a new clone;
- `interpreter`: Triton's kernels in its interpreter, which a process chooses when it starts;
- `avx2`: what computes, held to AVX2 by `TANDEM_CPU_LEVEL`, where this CPU has more.

Output of the first lane appears as it comes, that of the other, kept in `build/`, behind it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tandem.core.cpu_level import CpuLevel, cpu_level, named_level

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
INTERPRETER = "tests/unit/kernels/interpreter"
RUNNERS = 3
"""Number for two cores: half of the time of a test of processes is waiting."""
COMPUTING = (
    "tests/unit/kernels", "tests/unit/engine", "tests/unit/models", "tests/integration/engine/test_memory_plan.py",
    "tests/integration/bench/test_engine.py",
)  # fmt: skip
"""Tests with results that depend on the CPU."""


@dataclass(frozen=True, slots=True)
class Part:
    """A command, and what its environment has beside this one's."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def pytest(name: str, *arguments: str, **environment: str) -> Part:
    slowest = ("--durations=10", "--durations-min=1")
    return Part(name, (sys.executable, "-m", "pytest", "-q", *slowest, *arguments), environment)


def parts() -> list[Part]:
    """Parts that run on this CPU, with this environment."""
    side_by_side = ("-n", str(RUNNERS), "--dist", "loadfile", "--no-loadscope-reorder")
    without = f"--ignore={INTERPRETER}"
    found = [
        pytest("all", "tests", without, *side_by_side, "--record", "build/tests.jsonl"),
        Part("check", ("make", "check")),
        pytest("interpreter", INTERPRETER, TRITON_INTERPRET="1"),
    ]
    if named_level() is None and cpu_level() > CpuLevel.AVX2:
        found.append(pytest("avx2", *COMPUTING, without, "-m", "not slow", TANDEM_CPU_LEVEL=CpuLevel.AVX2.label))
    return found


def run(parts: list[Part]) -> int:
    """Run the first part, and beside it the others in turn; 1 if any failed, naming it. All end with this process."""
    BUILD.mkdir(exist_ok=True)
    first, *others = parts
    begun_s = time.monotonic()
    started = [_start(first, None)]
    failed = []
    try:
        for part in others:
            with (BUILD / f"tests-{part.name}.out").open("wb") as file:
                started.append(_start(part, file.fileno()))
                failed += [part.name] if started[-1].wait() else []
        failed = [first.name, *failed] if started[0].wait() else failed
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
    for part in others:
        said = (BUILD / f"tests-{part.name}.out").read_text(errors="replace")
        print(f"==> tests: {part.name}\n{said}", flush=True)
    took_s = time.monotonic() - begun_s
    print(f"==> tests: {'FAILED: ' + ', '.join(failed) if failed else 'passed'}, {took_s / 60:.1f} minutes", flush=True)
    return 1 if failed else 0


def _start(part: Part, output: int | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        part.command, cwd=ROOT, env={**os.environ, **part.environment}, stdout=output, stderr=output,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> int:
    if len(sys.argv) > 1:
        return _start(pytest("named", *sys.argv[1:]), None).wait()
    from tandem.kernels.warmup import prepare

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of `run`, which ends what it started

    print("==> tests: compiling C code, once for all processes", flush=True)
    prepare()
    return run(parts())


if __name__ == "__main__":
    sys.exit(main())
