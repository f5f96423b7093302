"""Calibrations: fits, bench files, what the sim engine's settings say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cluster.simulator import calibration
from tandem.cluster.simulator.calibration import Calibration
from tandem.cluster.simulator.fit import NotEnoughRowsError, fit
from tandem.core.config import SimSection, WorkerSection
from tandem.core.errors import ConfigError


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


def test_a_rate_alone_is_enough() -> None:
    found = calibration.from_record({"prefill_tokens_per_s": 2000})
    assert found.prefill_step_s + found.chunk_s(5000, 5100) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "is no object"),
        ("{", "cannot be read"),
        ('{"prefil_token_s": 1}', "unknown key prefil_token_s"),
        ('{"kv_tokens": -1}', "kv_tokens is -1"),
        ('{"block_tokens": 0}', "block_tokens is 0"),
        ('{"decode_steps": []}', "decode_steps cannot be fitted"),
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


def test_the_layout_has_the_tokens_bytes() -> None:
    assert Calibration(kv_token_bytes=1000).layout().token_bytes() == 1000
