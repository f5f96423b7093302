"""Flags, exit codes and one-line errors of the command line, without a cluster."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tandem.clusterctl import main as program
from tandem.clusterctl import status_view
from tandem.clusterctl.up_flags import UpFlags
from tandem.core.config import ClusterConfig, Disaggregation
from tandem.core.errors import ConfigError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["clusterctl", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main()
    return int(ended.value.code or 0)


def test_no_flags_are_the_defaults() -> None:
    assert UpFlags().to_config() == ClusterConfig()


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('name = "f"\n[router]\nport = 7000\nhost = "::1"\n[worker]\nis_deterministic = true\n')
    flags = UpFlags(
        config=file, port=0, deterministic=False, kv_memory="64MiB", served_model_name=("a", "b"),
        disaggregation=Disaggregation.ALWAYS, prefill=2,
    )  # fmt: skip
    config = flags.to_config()
    assert (config.name, config.router.port, config.router.host) == ("f", 0, "::1")
    assert not config.worker.is_deterministic
    assert config.worker.kv_memory_bytes == 64 * 2**20
    assert config.model.served_names == ("a", "b")
    assert (config.router.disaggregation, config.pools.prefill) == (Disaggregation.ALWAYS, 2)


def test_a_bad_size_names_its_flag() -> None:
    with pytest.raises(ConfigError, match="--kv-memory is 'lots'"):
        UpFlags(kv_memory="lots").to_config()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status"], 1, "no cluster 'tandem' is running here"),
        (["down", "--name", "other"], 1, "no cluster 'other' is running here"),
        (["up", "--config", "/no/such/file.toml"], 2, "cannot read the configuration /no/such/file.toml"),
        (["up", "--model", "/no/such/model"], 2, "cannot load the model /no/such/model"),
        (["up", "--prefill", "1"], 2, "cannot serve"),
        (["up", "--log-level", "LOUD"], 2, "--log-level is 'LOUD'"),
        (["up", "--name", "a/b"], 2, "cannot be a cluster's name"),
        (["status", "--endpoint", "http://127.0.0.1:9"], 2, "cannot read the admin key"),
        (["status", "--endpoint", "nonsense", "--admin-key-file", "/dev/null"], 1, "no cluster answers at nonsense"),
    ],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    arguments: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    assert run(monkeypatch, *arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["up", "--porrt", "3"], ["status", "-o", "xml"], ["up", "--prefill", "two"]])
def test_wrong_usage_ends_with_2(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    assert run(monkeypatch, *arguments) == 2


def test_the_nearest_key_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[router]\nprot = 1\n")
    assert run(monkeypatch, "up", "--config", str(file)) == 2
    assert f"unknown key 'prot' in [router] of {file}. The nearest known key is 'port'." in capsys.readouterr().err


def test_status_as_a_table_shows_everything() -> None:
    text = io.StringIO()
    status = {"cluster": "c", "ready": True, "workers": [{"id": "p-0", "blocks": 7}, {"id": "d-0", "role": "decode"}]}
    status_view.show(json.loads(json.dumps(status)), Console(file=text, width=100))
    shown = text.getvalue()
    for word in ("cluster", "yes", "workers", "p-0", "7", "decode", "–"):
        assert word in shown
