"""Targets of mutation, and the tests that have to notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Target:
    """`files` are globs from the root. `tests` run in this order and end with the first that fails: quick ones first.
    `left_out`: files among these that no test here can run, with the reason. `nearest`: pytest's arguments in place of
    `tests` for files that match a glob, the first that does: the fewest tests that should hold its promises, where all
    of them would take minutes a mutant."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: Mapping[str, str]
    nearest: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """Files to mutate. Raises ValueError for a glob without a file."""
        found: list[str] = []
        for pattern in self.files:
            matches = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(pattern))]
            if not matches:
                raise ValueError(f"no file matches {pattern}")
            found += matches
        return [path for path in found if path not in self.left_out and not path.endswith("__init__.py")]

    def tests_of(self, path: str) -> tuple[str, ...]:
        """Arguments of pytest for the tests that have to notice a change of this file."""
        return next((tests for pattern, tests in self.nearest.items() if fnmatch(path, pattern)), self.tests)


_NEEDS_GPU = "runs on a CUDA device only"
_INDEX, _KV = "tests/unit/statestore", "tests/unit/kvtransfer"
_OVER = "tests/integration/kvtransfer"
_TRANSPORTS = "kvtransfer/tandem/kvtransfer/transports"
_ROUTING = "router/tandem/router/routing"

TARGETS: Mapping[str, Target] = {
    "blockhash": Target(
        files=("core/tandem/core/block_hash.py", "core/tandem/core/token_ids.py"),
        tests=("tests/unit/core/test_block_hash.py",),
        left_out={},
    ),
    "ledger": Target(
        files=("core/tandem/core/ledger.py",),
        tests=(
            "tests/unit/core/test_ledger.py", "tests/unit/core/test_ledger_states.py",
            "tests/unit/router/admin/test_block_hold_audit.py",
        ),
        left_out={},
    ),
    "scheduler": Target(
        files=(
            "engine/tandem/engine/scheduler.py", "engine/tandem/engine/step_budget.py",
            "core/tandem/core/prefill_queue.py",
        ),
        tests=(
            "tests/unit/core/test_prefill_queue.py", "tests/unit/engine/test_step_budget.py",
            "tests/unit/engine/test_chunk_sizes.py",
            "tests/unit/engine/test_scheduler.py", "tests/unit/engine/test_begun_steps.py",
            "tests/unit/engine/test_ended_choices.py", "tests/unit/engine/test_engine.py",
            "tests/unit/engine/test_hand_over.py", "tests/unit/engine/test_prompt_logprobs.py",
            "tests/unit/docs/test_routing.py", "tests/unit/engine/test_engine_states.py",
        ),
        left_out={},
    ),
    "policy": Target(
        files=(f"{_ROUTING}/policies/*.py", f"{_ROUTING}/plan.py", f"{_ROUTING}/cost_model.py"),
        tests=(
            "tests/unit/router/routing/test_plan.py", "tests/unit/router/routing/test_prefixes.py",
            "tests/unit/router/routing/test_worker_load.py", "tests/unit/router/routing/policies",
            "tests/unit/docs/test_routing.py", "tests/unit/clusterctl/test_inspect.py",
        ),
        left_out={},
    ),
    "replica": Target(
        files=(
            "statestore/tandem/statestore/index/replica.py", "statestore/tandem/statestore/index/block_table.py",
            "statestore/tandem/statestore/index/speculation.py",
        ),
        tests=(
            "tests/unit/statestore/test_block_table.py", "tests/unit/statestore/index/test_speculation.py",
            "tests/unit/statestore/test_shared_speculation.py", "tests/unit/statestore/index/test_lease_book.py",
            "tests/unit/docs/test_index.py", "tests/integration/statestore/test_replica.py",
            "tests/integration/statestore/test_publish_and_follow.py",
        ),
        left_out={},
        nearest={
            "*/block_table.py": (f"{_INDEX}/test_block_table.py",),
            "*/speculation.py": (
                f"{_INDEX}/index/test_speculation.py", f"{_INDEX}/test_shared_speculation.py",
                "tests/unit/docs/test_index.py",
            ),
            "*/replica.py": (
                f"{_INDEX}/index/test_lease_book.py", "tests/unit/docs/test_index.py",
                "tests/integration/statestore/test_replica.py",
                "tests/integration/statestore/test_publish_and_follow.py",
            ),
        },
    ),
    "kvtransfer": Target(
        files=("kvtransfer/tandem/kvtransfer/*.py", f"{_TRANSPORTS}/*.py"),
        tests=("tests/unit/kvtransfer", "tests/unit/docs/test_transfer.py", "tests/integration/kvtransfer"),
        left_out={
            f"{_TRANSPORTS}/{name}.py": _NEEDS_GPU for name in ("nccl_communicator", "cuda_memory", "cuda_driver")
        },
        nearest={
            "*/frame.py": (f"{_KV}/test_frame.py", "tests/unit/docs/test_transfer.py", f"{_KV}/test_receiver_core.py"),
            "*/coverage.py": (f"{_KV}/test_layout.py", f"{_KV}/test_receiver_core.py"),
            "*/receiver_core.py": (f"{_KV}/test_receiver_core.py", f"{_KV}/test_receiver_core_machine.py"),
            "*/head_routes.py": (f"{_KV}/test_layout.py", f"{_KV}/test_payload_forms.py"),
            "*/kv_pool_access.py": (
                f"{_KV}/test_kv_pool_access.py", f"{_KV}/test_payload_forms.py", f"{_KV}/test_layout.py",
            ),
            "*/jobs.py": (
                f"{_KV}/test_payload_forms.py", _OVER, "-k", "payload_forms or shm or choice or measured or peer_link",
            ),
            "*/wire_codec.py": (f"{_KV}/test_payload_forms.py", f"{_KV}/test_layout.py"),
            "*/leases.py": (f"{_KV}/test_state.py",),
            "*/state.py": (f"{_KV}/test_state.py",),
            "*/link_meter.py": (f"{_KV}/test_link_meter.py", "tests/unit/docs/test_transfer.py"),
            "*/link_speeds.py": (f"{_KV}/test_link_speeds.py", "tests/unit/docs/test_transfer.py"),
            "*/transport_selection.py": (f"{_KV}/test_transport_selection.py",),
            "*/remeasure.py": (f"{_KV}/test_transport_selection.py", "tests/unit/docs/test_transfer.py"),
            "*/probed_connection.py": (f"{_KV}/test_transport_selection.py", "tests/unit/docs/test_transfer.py"),
            "*/payload_ring.py": (f"{_KV}/test_payload_ring.py", "tests/unit/docs/test_transfer.py"),
            "*/flow_control.py": (
                f"{_KV}/test_flow_control.py", f"{_KV}/test_payload_ring.py", "tests/unit/docs/test_transfer.py",
            ),
            "*/tcp.py": (f"{_KV}/test_transport_edges.py", _OVER, "-k", "tcp or edges"),
            "*/tcp*.py": (_OVER, "-k", "tcp"),
            "*/grpc*.py": (f"{_KV}/test_grpc_messages.py", _OVER, "-k", "grpc"),
            "*/col*.py": (
                f"{_KV}/test_transport_edges.py", "tests/unit/docs/test_transfer.py", _OVER, "-k",
                "gloo or collective or edges or docs",
            ),
            "*/gloo_communicator.py": (_OVER, "-k", "gloo or collective"),
            "*/ipc*.py": (_OVER, "-k", "ipc"),
            "*/frame_seqlock.py": (f"{_KV}/test_device_memory.py", _OVER, "-k", "device or ipc"),
            "*/sealed_memfd.py": (f"{_KV}/test_transport_edges.py",),
            "*/shm.py": (f"{_KV}/test_transport_edges.py", _OVER, "-k", "edges or shm"),
            "*/device_memory.py": (f"{_KV}/test_device_memory.py", _OVER, "-k", "device or ipc"),
            "*/writable_bytes.py": (f"{_KV}/test_grpc_messages.py",),
            "*/acceptor.py": (f"{_OVER}/test_acceptor.py",),
            "*": (_OVER, "-k", "shm or choice or measured or peer_link"),
        },
    ),
}  # fmt: skip
