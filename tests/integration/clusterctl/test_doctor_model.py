"""`clusterctl doctor --model` says what a model will take before it is loaded, and refuses what cannot be served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proof.packed.__main__ import write_packed
from tandem.clusterctl.doctor.findings import CheckResult, Finding, run
from tandem.clusterctl.doctor.model_checks import ModelChecks
from tandem.controlplane.kv_plan import weight_bytes
from tandem.engine.model_config import read_model_config
from tandem.engine.pool_plan import kv_layout
from tandem.engine.runner import ModelRunner
from tools.gguf_model import GgufModel, write_gguf
from tools.random_model import RandomModel, make_random_model


def checked(model: Path, **settings: Any) -> dict[str, Finding]:
    checks = ModelChecks(model=str(model), models_root=None, **settings).checks()
    return {finding.check: finding for finding in run(checks)}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """A random model of a family."""

    def made(family: str, **shape: Any) -> Path:
        make_random_model(RandomModel(family=family, **shape), tmp_path / family)
        return tmp_path / family

    return made


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [("llama", False), ("qwen3", True), ("mixtral", False), ("gpt_oss", False), ("deepseek_v2", False)],
)
def test_its_sizes_are_those_of_a_worker_that_loads_it(family: str, is_tied: bool, make: Callable[..., Path]) -> None:
    folder = make(family, hidden=256, vocab=4096, layers=3, is_tied=is_tied)
    found = checked(folder)
    assert found["model"].verdict is CheckResult.OK
    assert "3 layers" in found["model"].what
    config = read_model_config(folder)
    for kind in ("none",) if family == "deepseek_v2" else ("none", "int8", "w4a16"):
        loaded = ModelRunner(model_dir=folder, dtype="bfloat16", quantize=kind, num_blocks=8, max_model_len=64)
        layout = kv_layout(config, dtype="bfloat16", block_tokens=16, tp=1)
        said = weight_bytes(config, layout, "bfloat16", kind)
        assert said == pytest.approx(loaded.memory.weights, rel=0.12), "second numbers are an eighth of so few columns"


def test_packed_weights_are_named_with_a_format_that_is_smaller(make: Callable[..., Path], tmp_path: Path) -> None:
    write_packed(tmp_path / "awq", "AWQ")
    write_gguf(make("llama"), tmp_path / "model.gguf", GgufModel(kind="Q4_0"))
    for path, form in ((tmp_path / "awq", "AWQ, 4 bits in groups of 64"), (tmp_path / "model.gguf", "GGUF (Q4_0")):
        found = checked(path)
        assert form in found["model"].what
        assert found["model-weights"].verdict is CheckResult.WARNING
        assert "add --quantize w4a16" in found["model-weights"].fix
        assert checked(path, quantize="w4a16")["model-weights"].verdict is CheckResult.OK


def test_a_family_without_quantised_products_is_slow_on_a_cpu(make: Callable[..., Path]) -> None:
    folder = make("deepseek_v2", dtype="bfloat16")
    slow = checked(folder)["model-speed"]
    assert slow.verdict is CheckResult.WARNING
    assert "DeepseekV2 has no quantised products" in slow.what
    findings = [*run(ModelChecks(model=str(folder), models_root=None, quantize="w4a16").checks())]
    assert findings[0].what == "--quantize w4a16 cannot be used with DeepseekV2"
    assert findings[0].verdict is CheckResult.ERROR
    assert {one.verdict for one in findings if one.check in ("model-weights", "model-speed")} == {CheckResult.SKIPPED}


def test_memory_that_is_not_free_is_an_error_with_a_format_that_fits(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("llama", hidden=256, vocab=4096, layers=3, dtype="bfloat16")
    config = read_model_config(folder)
    plain, small = (
        weight_bytes(config, kv_layout(config, dtype="bfloat16", block_tokens=16, tp=1), "bfloat16", kind)
        for kind in ("none", "int8")
    )
    monkeypatch.setattr("tandem.clusterctl.doctor.model_checks.free_host_bytes", lambda: (plain + small) // 2)
    large = checked(folder)["model-weights"]
    assert (large.verdict, large.fix) == (CheckResult.ERROR, "add --quantize int8")
    monkeypatch.setattr("tandem.clusterctl.doctor.model_checks.free_host_bytes", lambda: 1000)
    found = checked(folder)
    assert "more memory" in found["model-weights"].fix
    assert found["model-kv"].verdict is CheckResult.WARNING


def test_what_cannot_be_served_is_said_once(make: Callable[..., Path]) -> None:
    folder = make("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["WhisperForCausalLM"]}))
    found = checked(folder)
    assert found["model"].verdict is CheckResult.ERROR
    assert "Whisper" in found["model"].what
    assert {found[name].verdict for name in found if name != "model"} == {CheckResult.SKIPPED}
    missing = checked(Path("owner/name"))
    assert missing["model"].verdict is CheckResult.WARNING
    assert "not on this machine" in missing["model"].what


def test_a_model_without_a_chat_template_refuses_chats(make: Callable[..., Path]) -> None:
    folder = make("llama")
    assert checked(folder)["model-chat"].verdict is CheckResult.OK
    for file in folder.glob("tokenizer_config.json"):
        file.write_text("{}")
    assert checked(folder)["model-chat"].verdict is CheckResult.WARNING
    (folder / "tokenizer.json").write_text("{}")
    assert checked(folder)["model-chat"].verdict is CheckResult.ERROR
    (folder / "model.safetensors").unlink()
    assert checked(folder)["model"].verdict is CheckResult.ERROR
