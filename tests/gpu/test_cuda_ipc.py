"""`cuda_ipc` on one GPU: the conformance suite, then two processes, with its speed beside the device's own copy.

The suite runs in one process, where an address stands for the driver's handle; peers in processes of their own and the
bench's pair open handles.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc")  # the suite's rig carries raw bytes for every transport

from tandem.kernels.payload_checksum import payload_checksum
from tandem.kvtransfer.transports.base import WINDOW_BYTES
from tests.integration.kvtransfer.conformance import test_ends, test_hostile, test_lives, test_processes, test_wire
from tests.integration.kvtransfer.conftest import any_rig
from tests.integration.kvtransfer.rig import Rig

__all__ = ["any_rig", "wired_rig"]
wired_rig = test_wire.wired_rig
for module in (test_ends, test_hostile, test_lives, test_processes, test_wire):
    for name, test in tuple(vars(module).items()):
        if name.startswith("test_"):
            if name in globals():
                raise ImportError(f"two tests of the suite are called {name}")
            globals()[name] = test
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    from tandem.kvtransfer.transports.cuda_memory import CudaMemory

    torch.zeros(1, device="cuda")  # the process uses this device: a link asks which one
    monkeypatch.setattr(CudaMemory, "least_window_bytes", WINDOW_BYTES)  # the suite counts on the usual window
    made = Rig("cuda_ipc", tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 2, 8191, 1 << 20, (16 << 20) + 1])
def test_the_device_takes_the_checksum_of_the_reference(size: int) -> None:
    data = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    assert payload_checksum(data) == payload_checksum(data.cpu(), backend="reference")


def test_two_processes_on_one_gpu_move_every_byte(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench.gpu", "--part", "transfer", "--out", str(out), "--commit", "test"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    assert [row for row in rows if row["metric"] == "numbers that differ"]
    assert all(row["value"] == 0 for row in rows if row["unit"] == "error")
    print("\n".join(f"{row['case']}: {row['metric']} {row['value']:.3g} {row['unit']}" for row in rows))
