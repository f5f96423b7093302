"""Calibrations: fits, bench files, the sim engine's settings."""

import json
from pathlib import Path

import pytest

from tandem.controlplane.simulator import calibration
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.fit_measurements import Moves, NotEnoughRowsError, fit
from tandem.core.config import SimSection, WorkerSection
from tandem.core.errors import ConfigError
from tandem.engine.runner_protocol import SeqSlice
from tandem.engine.sim.runner import durations


def test_a_fit_finds_the_coefficients_that_made_the_rows() -> None:
    rows = [
        (1.0, float(b), float(b * c), 0.006 + 3e-5 * b + 5e-8 * b * c) for b in (1, 8, 64) for c in (100, 2000, 9000)
    ]
    assert fit(rows) == pytest.approx((0.006, 3e-5, 5e-8), rel=1e-6)


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    rows = [(1.0, float(x), 0.0, 2.0 - 0.1 * x) for x in range(5)]
    constant, slope, unused = fit(rows)
    assert constant > 0
    assert (slope, unused) == (0.0, 0.0)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(NotEnoughRowsError, match="at least 3"):
        fit([(1.0, 1.0, 1.0, 1.0)] * 2)


def test_a_bench_file_is_fitted(tmp_path: Path) -> None:
    steps = [{"batch": b, "context": c, "s": 0.01 + 1e-4 * b + 2e-8 * b * c} for b in (1, 16) for c in (64, 4096)]
    chunks = [
        {"tokens": n, "context": c, "s": 0.002 + 1e-5 * n + 1e-9 * n * (c + n / 2)}
        for n in (64, 512)
        for c in (0, 8192)
    ]
    record = {"decode_steps": steps, "prefill_steps": chunks, "link_bytes_per_s": 1e9, "kv_tokens": 1024}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(record))
    found = calibration.read(path)
    assert found.name == "machine"
    assert found.decode_s(4, 4000) == pytest.approx(0.01 + 4e-4 + 8e-5)
    assert found.prefill_step_s + found.chunk_s(100, 356) == pytest.approx(0.002 + 256e-5 + 1e-9 * 256 * (100 + 128))
    assert (found.link_bytes_per_s, found.blocks) == (1e9, 2)


MIXED = [
    {"tokens": n, "context": 64, "batch": b, "batch_context": 500, "s": 0.02 + 1e-3 * n + 2e-3 * b - 0.007}
    for n in (16, 256)
    for b in (1, 8)
]
KNOWN = {
    "prefill_step_s": 0.012, "prefill_token_s": 1e-3, "prefill_context_s": 0.0,
    "decode_step_s": 0.008, "decode_sequence_s": 2e-3, "decode_context_s": 0.0,
}  # fmt: skip


def test_a_step_that_does_both_takes_less_than_the_two() -> None:
    found = calibration.from_record({**KNOWN, "mixed_steps": MIXED})
    assert found.shared_step_s == pytest.approx(0.007)
    assert found.step_s([(64, 80)], 1, 500) == pytest.approx(0.02 + 0.016 + 0.002 - 0.007)
    assert found.step_s([(64, 80)], 0, 0) == pytest.approx(0.012 + 0.016)
    assert found.step_s([], 2, 1000) == pytest.approx(found.decode_s(2, 1000)) == pytest.approx(0.012)


def test_what_a_step_that_does_both_saves_is_neither_below_zero_nor_more_than_there_is() -> None:
    slow = [{**row, "s": row["s"] + 1.0} for row in MIXED]
    assert calibration.from_record({**KNOWN, "mixed_steps": slow}).shared_step_s == 0.0
    fast = [{**row, "s": 1e-4} for row in MIXED]
    assert calibration.from_record({**KNOWN, "mixed_steps": fast}).shared_step_s == pytest.approx(0.02)


def test_links_are_as_fast_as_long_moves_say() -> None:
    moves = [{"bytes": n, "s": 0.002 + n / 1e9} for n in (1_000_000, 8_000_000, 64_000_000)]
    assert calibration.from_record({"kv_moves": moves}).link_bytes_per_s == pytest.approx(1e9)
    assert Moves.fitted(moves).move_s == pytest.approx(0.002)
    assert Moves.fitted(moves).takes_s(5_000_000) == pytest.approx(0.007)


def test_what_a_benchmark_writes_is_a_calibration(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"name": "engine", "rows": [], "calibration": {**KNOWN, "kv_tokens": 2048}}))
    found = calibration.read(path)
    assert (found.name, found.decode_step_s, found.kv_tokens) == ("engine", 0.008, 2048)


def test_a_rate_alone_is_enough() -> None:
    found = calibration.from_record({"prefill_tokens_per_s": 2000})
    assert found.prefill_step_s + found.chunk_s(5000, 5100) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "is not an object"),
        ("{", "cannot be read"),
        ('{"prefil_token_s": 1}', "unknown key prefil_token_s"),
        ('{"kv_tokens": -1}', "kv_tokens is -1"),
        ('{"block_tokens": 0}', "block_tokens is 0"),
        ('{"decode_steps": []}', "decode_steps cannot be fitted"),
        ('{"shared_step_s": 1}', "shared_step_s is 1"),
        ('{"calibration": [1]}', "is not an object"),
        ('{"kv_moves": [{"bytes": 1, "s": 1}]}', "kv_moves cannot be fitted"),
        ('{"kv_moves": [{"s": 1}]}', "no 'bytes'"),
        ('{"kv_moves": [{"bytes": 1, "s": 2}, {"bytes": 2, "s": 2}, {"bytes": 9, "s": 1}]}', "no more time"),
        ('{"mixed_steps": [{"tokens": 1, "context": 0, "batch": 1, "batch_context": 1, "s": 0}]}', "a step took 0.0 s"),
    ],
)
def test_a_wrong_bench_file_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        calibration.read(path)


def test_the_sim_engines_settings_are_taken_over() -> None:
    worker = WorkerSection(
        sim=SimSection(prefill_tokens_per_s=4000.0, decode_step_s=0.02, decode_sequence_s=0.001),
        kv_memory_bytes=1 << 20, block_tokens=16, chunk_tokens=256,
    )  # fmt: skip
    found = calibration.of_sim_engine(worker, kv_token_bytes=1024, link_bytes_per_s=1e9, rpc_s=0.001)
    assert found.prefill_step_s + found.chunk_s(512, 1024) == pytest.approx(512 / 4000)
    assert found.decode_s(8, 100_000) == pytest.approx(0.028)
    assert (found.blocks, found.scheduler.chunk_tokens) == (64, 256)


def test_the_sim_engine_takes_as_long_as_its_calibration_says() -> None:
    timing = SimSection(
        prefill_tokens_per_s=4000.0, prefill_step_s=0.003, prefill_context_s=1e-5, decode_step_s=0.02,
        decode_sequence_s=0.001, decode_context_s=1e-4,
    )  # fmt: skip
    found = calibration.of_sim_engine(WorkerSection(sim=timing), kv_token_bytes=1024, link_bytes_per_s=1e9, rpc_s=0.001)
    sequences = [SeqSlice(1, 17, ()), SeqSlice(40, 60, ()), SeqSlice(1, 9, ()), SeqSlice(8, 8, ())]
    chunks = [(20, 60), (0, 8)]
    assert sum(durations(timing, sequences)) == pytest.approx(found.step_s(chunks, 2, 26))
    assert durations(timing, sequences[::2]) == pytest.approx((0.0, found.step_s([], 2, 26)))
    assert durations(timing, sequences[1::2]) == pytest.approx((found.step_s(chunks, 0, 0), 0.0))
    assert durations(SimSection(), sequences) == (0.0, 0.0)


def test_the_layout_has_the_tokens_bytes() -> None:
    assert Calibration(kv_token_bytes=1000).layout().token_bytes() == 1000
