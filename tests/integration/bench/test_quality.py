"""bench/quality on the real model, where it can be had: a window of each kind of text, six of its precisions."""

from pathlib import Path

import pytest

from bench.quality import __main__ as quality
from tests.integration.engine.real_model import smollm2


def test_a_precision_is_measured_against_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = smollm2()
    monkeypatch.setattr(
        quality, "OURS", {name: quality.OURS[name] for name in ("fp32", "bf16", "int8", "w8a8", "w4a16")}
    )
    monkeypatch.setattr(quality, "GGUF", ())  # half a minute for each
    monkeypatch.setattr(quality, "CALIBRATED", ("w4a16",))
    monkeypatch.setattr(quality, "MOST_TOKENS", 1536)
    monkeypatch.setattr(quality, "WINDOW", 96)
    monkeypatch.setattr(quality, "ANSWER_TOKENS", 12)
    rows, answers = quality.measured(file, tmp_path, 1)
    found = {(row.case, row.metric): row for row in rows}
    assert {case for case, _ in found} == {"prose", "code", "chat"}
    assert "Paris" in answers["fp32"]
    for case in ("prose", "code", "chat"):
        assert found[case, "fp32: perplexity, of fp32's"].ratio == 1
        close, near, far = (found[case, f"{name}: KL, of bf16's"].value for name in ("bf16", "int8", "w8a8"))
        assert 0 < close < far < 1
        assert near < far / 3, "rows of 16 bits keep what is beside a large activation"
        assert found[case, "bf16: same first token"].value > 80
        assert found[case, "w4a16: KL, of bf16's"].value < 0.15, "0.2 where all errors count alike"
        assert found[case, "w4a16 by a text: KL, of bf16's"].value < 0.15
