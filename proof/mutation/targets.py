"""What is mutated, and which tests have to notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Target:
    """`files` are globs from the root. `tests` run in this order and end with the first that fails: quick ones first.
    `left_out`: files among these that no test here can run, with the reason."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: Mapping[str, str]

    def paths(self) -> list[str]:
        found = (path.relative_to(ROOT).as_posix() for pattern in self.files for path in sorted(ROOT.glob(pattern)))
        return [path for path in found if path not in self.left_out and not path.endswith("__init__.py")]


_NEEDS_GPU = "runs on a CUDA device only"
_TRANSPORTS = "kvtransfer/tandem/kvtransfer/transports"

TARGETS: Mapping[str, Target] = {
    "blockhash": Target(
        files=("core/tandem/core/blockhash.py", "core/tandem/core/tokenids.py"),
        tests=("tests/unit/core/test_blockhash.py", "tests/unit/core/test_tokenids.py"),
        left_out={},
    ),
    "ledger": Target(
        files=("core/tandem/core/ledger.py",),
        tests=("tests/unit/core/test_ledger.py", "tests/unit/core/test_ledger_states.py"),
        left_out={},
    ),
    "scheduler": Target(
        files=(
            "engine/tandem/engine/scheduler.py", "engine/tandem/engine/pace.py", "core/tandem/core/prefill_queue.py",
        ),
        tests=(
            "tests/unit/core/test_prefill_queue.py", "tests/unit/engine/test_scheduler.py",
            "tests/unit/engine/test_engine.py", "tests/unit/engine/test_engine_states.py",
            "tests/unit/engine/test_hand_over.py",
        ),
        left_out={},
    ),
    "policy": Target(
        files=(
            "router/tandem/router/policies/*.py", "router/tandem/router/plan.py", "router/tandem/router/estimates.py",
            "router/tandem/router/sources.py",
        ),
        tests=("tests/unit/router/policies", "tests/unit/router/test_plan.py", "tests/unit/router/test_sources.py"),
        left_out={},
    ),
    "replica": Target(
        files=(
            "prefixindex/tandem/prefixindex/replica.py", "prefixindex/tandem/prefixindex/blocktable.py",
            "prefixindex/tandem/prefixindex/shards.py", "prefixindex/tandem/prefixindex/speculation.py",
        ),
        tests=(
            "tests/unit/prefixindex", "tests/integration/prefixindex/test_publish_and_follow.py",
            "tests/integration/prefixindex/test_lost_events.py", "tests/integration/prefixindex/test_convergence.py",
        ),
        left_out={},
    ),
    "kvtransfer": Target(
        files=("kvtransfer/tandem/kvtransfer/*.py", f"{_TRANSPORTS}/*.py"),
        tests=("tests/unit/kvtransfer", "tests/unit/protocol", "tests/integration/kvtransfer"),
        left_out={f"{_TRANSPORTS}/nccl.py": _NEEDS_GPU, f"{_TRANSPORTS}/cudamemory.py": _NEEDS_GPU},
    ),
}  # fmt: skip
