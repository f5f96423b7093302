"""CI's slice of `make proof NAME=hostile`: hostile clients disturb no stream, no link and no memory."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_honest_streams_live_beside_hostile_clients(tmp_path: Path) -> None:
    out = tmp_path / "hostile.json"
    command = [sys.executable, "-m", "proof.hostile", "--out", str(out), "--seconds", "24", "--slice", "24"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert out.exists(), ended.stdout + ended.stderr
    (found,) = json.loads(out.read_text())["slices"]
    # How much later tokens come is for the proof on a quiet machine: tests run beside others.
    assert [why for why in found["broken"] if not why.startswith("p99")] == [], ended.stdout
    assert found["answers"] > 0
    assert len(found["outcomes"]) >= 10
