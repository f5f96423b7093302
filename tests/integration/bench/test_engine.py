"""The engine's benchmark with the bundled model: every shape in its place, and a file that the simulator takes."""

import json
from pathlib import Path

import pytest

from bench.engine.__main__ import main
from bench.report import ROOT
from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.controlplane.simulator import calibration

SMALL = ["--model", str(ROOT / "models" / "tandem-tiny"), "--tokens", "8", "32", "64", "--contexts", "16", "128",
         "--batches", "1", "4"]  # fmt: skip


def test_measured_steps_calibrate_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    assert main([*SMALL, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    said = record["calibration"]
    assert {(row["tokens"], row["context"]) for row in said["prefill_steps"]} == {
        (tokens, context) for tokens in (8, 32, 64) for context in (0, 16, 128)
    }
    assert {(row["batch"], row["context"]) for row in said["decode_steps"]} == {(1, 16), (1, 128), (4, 16), (4, 128)}
    assert {(row["tokens"], row["batch"]) for row in said["mixed_steps"]} == {(32, 1), (32, 4)}
    assert len({row["bytes"] for row in said["kv_moves"]}) == 4

    found = calibration.read(out)
    steps = [row for row in record["rows"] if row["case"] in ("prefill", "decode", "mixed")]
    assert len(steps) == 9 + 4 + 2
    assert all(row["value"] > 0 and row["limit"] > 0 for row in steps)
    first = next(row for row in steps if row["metric"] == "64 tokens behind 128")
    assert first["limit"] == pytest.approx(1e3 * found.step_s([(128, 192)], 0, 0))
    assert found.blocks == 256 * 1024 * 1024 // (said["kv_token_bytes"] * 16), "as a worker's pool with the defaults"

    capsys.readouterr()
    load = ["--rate", "2", "--isl", "200", "--osl", "20", "--calibration", str(out), "-o", "json"]
    for command in (["simulate", "splits", "--workers", "2"], ["plan", "--accelerators", "2"]):
        assert program.run([*command, *load]) in (Exit.OK, Exit.SLO_MISSED)
        assert json.loads(capsys.readouterr().out)["kind"]


def test_speed_stands_beside_what_the_machine_can_do(tmp_path: Path) -> None:
    out, picture = tmp_path / "speed.json", tmp_path / "speed.svg"
    load = ["--speed", "--rounds", "1", "--batches", "1", "2", "--prompts", "16", "--windows", "2"]
    load += ["--picture", str(picture)]
    assert main([*load, "--model", str(ROOT / "models" / "tandem-tiny"), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    rows = {row["metric"]: row for row in record["rows"]}
    bandwidth, peak = rows["read bandwidth"]["value"], rows["GEMM peak"]["value"]
    assert bandwidth > 0
    assert peak > 0
    for batch in (1, 2):
        assert rows[f"decode, batch {batch}: bytes read, of the bandwidth"]["limit"] == bandwidth
    for what in ("decode, batch 1", "decode, batch 2", "prefill of 16"):
        assert rows[f"{what}: FLOPs, of the peak"]["limit"] == peak
        assert rows[f"{what}: tokens, of transformers'"]["ratio"] > 0
    assert rows["decode, batch 2: tokens, of batch 1's"]["ratio"] > 0
    assert record["threads"] >= 1
    for kind in ("int8", "w8a8", "int4", "w4a16"):
        assert rows[f"{kind} decode, batch 1: bytes read, of the bandwidth"]["limit"] == bandwidth
        assert rows[f"{kind} prefill of 16: tokens, of bf16's"]["ratio"] > 0
    errors = [
        rows[f"{name}: error of logits, of their norm"]["value"] for name in ("fp32", "bf16", "int8", "w8a8", "int4")
    ]
    assert errors[0] == 0 < errors[1] < errors[2] < errors[3] < errors[4] < 0.5
    costs = [rows[f"{name}: perplexity, of fp32's"]["ratio"] for name in ("fp32", "bf16", "int8", "w8a8", "int4")]
    assert costs[0] == 1
    assert max(costs[1:4]) < 1.02
    assert costs[4] < 1.2
    assert picture.read_text().startswith("<?xml")
