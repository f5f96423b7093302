"""Finding a model and naming it: folders, hub ids, errors in one line, fingerprints that see every byte."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ModelError
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import HUB_PATTERNS, ModelSource, fingerprint, resolve_model, sim_fingerprint


@pytest.fixture
def folder(model_folder: Any, tmp_path: Path) -> Path:
    copied = tmp_path / "my-model"
    shutil.copytree(model_folder("llama"), copied)
    return copied


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    assert resolve_model(str(folder)) == ModelSource(name="my-model", path=folder)
    with pytest.raises(ModelError, match="has no revisions"):
        resolve_model(str(folder), revision="main")


def test_a_folder_whose_name_is_no_text_is_one_line_whatever_leads_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = folder.rename(tmp_path / "mod\udce9l")
    (tmp_path / "link").symlink_to(odd)
    monkeypatch.chdir(odd)
    for given in (str(odd), str(tmp_path / "link"), "."):
        with pytest.raises(ModelError, match=r"mod\\udce9l': that is no UTF-8 text. Rename it") as caught:
            resolve_model(given)
        assert str(caught.value).isascii()


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "../nowhere"])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(name)


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(ModelError, match="it is a file"):
        resolve_model(str(folder / "model.safetensors"))


def test_a_hub_id_is_fetched_at_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path / "snapshots" / "abc123")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_model("owner/name", revision="v2")
    assert (source.name, source.commit, source.path.name) == ("owner/name", "abc123", "abc123")
    assert asked == {"repo": "owner/name", "revision": "v2", "allow_patterns": list(HUB_PATTERNS)}
    assert not any("bin" in pattern or "py" in pattern for pattern in HUB_PATTERNS)
    resolve_model("owner/name", has_weights=False)
    assert "*.safetensors" not in asked["allow_patterns"]
    assert "*.json" in asked["allow_patterns"]


@pytest.mark.slow
def test_offline_without_a_copy_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub library reads its switch at import, so a fresh interpreter asks."""
    program = (
        "from tandem.core.errors import ModelError\nfrom tandem.engine.model_source import resolve_model\n"
        "try:\n    resolve_model('owner/absent')\nexcept ModelError as error:\n    print(error)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(
        "owner/absent is no folder here and cannot be fetched from the hub: LocalEntryNotFoundError"
    )


def failures() -> list[Exception]:
    from huggingface_hub import errors

    http_error = errors.HfHubHTTPError.__bases__[0]
    return [OSError("cut\nand more"), errors.LocalEntryNotFoundError("cut"), http_error("cut"), ValueError("cut")]


@pytest.mark.parametrize("failure", failures(), ids=lambda error: type(error).__name__)
def test_every_failure_of_the_hub_is_one_line(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(repo: str, **options: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=rf"owner/name .* at v1: {type(failure).__name__}: cut\. Check") as caught:
        resolve_model("owner/name", revision="v1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_one_changed_byte_changes_the_fingerprint(name: str, folder: Path) -> None:
    config = read_model_config(folder)
    before = fingerprint(resolve_model(str(folder)), config, compute_dtype="float32")
    assert before == fingerprint(resolve_model(str(folder)), config, compute_dtype="float32")
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(data)
    after = fingerprint(resolve_model(str(folder)), config, compute_dtype="float32")
    assert after.revision != before.revision
    assert (after.tokenizer != before.tokenizer) == (name == "tokenizer.json")


def test_a_simulated_model_is_its_config_and_tokenizer(folder: Path) -> None:
    config, source = read_model_config(folder), resolve_model(str(folder))
    before = sim_fingerprint(source, config)
    assert before.compute_dtype == "sim"
    assert before.digest() != fingerprint(source, config, compute_dtype="sim").digest()
    (folder / "model.safetensors").unlink()
    assert sim_fingerprint(source, config) == before
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert sim_fingerprint(source, config).revision != before.revision


def test_the_fingerprint_names_positions_dtype_and_commit(folder: Path) -> None:
    config = read_model_config(folder)
    source = ModelSource(name="owner/name", path=folder, commit="abc123")
    base = fingerprint(source, config, compute_dtype="float32")
    assert (base.model, base.revision, base.compute_dtype) == ("owner/name", "abc123", "float32")
    other_rope = replace(config, rope=replace(config.rope, theta=1.0))
    digests = {
        base.digest(),
        fingerprint(source, config, compute_dtype="bfloat16").digest(),
        fingerprint(source, other_rope, compute_dtype="float32").digest(),
    }
    assert len(digests) == 3


@pytest.mark.slow
def test_asking_for_a_model_imports_no_torch() -> None:
    program = "import sys, tandem.engine.model_source, tandem.engine.runner_protocol; print('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
