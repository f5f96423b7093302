"""`up --dry-run` and `join --dry-run`: what would be started is shown and checked, and nothing is there afterwards."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.controlplane.ray import ray_start
from tandem.controlplane.state_dir import StateDir
from tandem.engine import model_source
from tandem.statestore.embedded_redis import PrivateRedis
from tests.unit.clusterctl.document_check import checked

MODEL = Path(__file__).parents[3] / "models" / "tandem-tiny"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder where a cluster would keep its state; it does not exist."""
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = program.run(list(arguments))
    return code, *capsys.readouterr()


def document(capsys: pytest.CaptureFixture[str], kind: str, *arguments: str) -> dict[str, Any]:
    code, out, error = run(capsys, *arguments, "--dry-run", "-o", "json")
    assert (code, error) == (0, "")
    return checked(out, kind)


def test_what_up_would_start(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    flags = (
        "up",
        "--prefill",
        "1",
        "--decode",
        "2",
        "--decode-tp",
        "2",
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--engine",
        "sim",
    )
    found = document(capsys, "Start", *flags, "--admin-port", "0", "--name", "trial", "--kv-memory", "64MiB")
    assert (found["is_dry_run"], found["is_complete"]) == (True, True)
    assert (found["cluster"], found["state_dir"]) == ("trial", str(state / "trial"))
    assert (found["launcher"], found["redis"], found["host"]) == ("local", None, "127.0.0.1")
    assert [found[port] for port in ("port", "grpc_port", "admin_port")] == [0, 0, 0]
    assert found["models"] == [{"model": "tandem-tiny", "path": str(MODEL), "served_names": ["tandem-tiny"]}]
    rows = [
        (pool["role"], pool["count"], pool["tp"], pool["engine"], pool["kv_memory_bytes"]) for pool in found["pools"]
    ]
    assert rows == [("prefill", 1, 1, "sim", 2**26), ("decode", 2, 2, "sim", 2**26)]
    assert found["settings"]["pools.decode"] == 2
    code, out, error = run(capsys, *flags, "--dry-run")
    assert (code, error) == (0, "")
    for words in ("cluster   tandem, started by local", "redis     a private server", "HTTP any free one",
                  f"in {MODEL}", "setting   pools.decode = 2", "nothing was started (--dry-run)"):  # fmt: skip
        assert words in out, out
    assert not state.exists(), "not even the folder for its state"


def test_a_redis_that_is_named_has_to_answer_and_its_password_stays_hidden(
    capsys: pytest.CaptureFixture[str], state: Path, tmp_path: Path
) -> None:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server:
        found = document(capsys, "Start", "up", "--redis", server.url, "--port", "0")
        assert found["redis"]
        assert "hush" not in json.dumps(found)
        url = server.url
    code, out, error = run(capsys, "up", "--redis", url, "--port", "0", "--dry-run")
    assert (code, out) == (Exit.USAGE, "")
    assert "cannot reach Redis at" in error
    assert "hush" not in error


def test_a_hub_model_is_not_fetched(
    capsys: pytest.CaptureFixture[str], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*arguments: object) -> Path:
        raise AssertionError("it asks the hub")

    monkeypatch.setattr(model_source, "_download", fetched)
    found = document(capsys, "Start", "up", "--model", "owner/name", "--port", "0", "--mixed", "1")
    assert found["is_complete"] is False
    assert found["models"] == [{"model": "owner/name", "path": None, "served_names": ["owner/name"]}]
    assert [(pool["role"], pool["model"]) for pool in found["pools"]] == [("mixed", "owner/name")]
    out = run(capsys, "up", "--model", "owner/name", "--port", "0", "--dry-run")[1]
    assert "owner/name to be fetched when it starts: its files are not checked" in out
    assert not state.exists()


@pytest.mark.parametrize("flags", [("--model", "smollm2"), ("--fetch",)])
def test_nor_is_one_that_has_a_name(
    capsys: pytest.CaptureFixture[str], state: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TANDEM_MODELS_DIR", str(state / "models"))
    found = document(capsys, "Start", "up", *flags, "--port", "0")
    assert found["is_complete"] is False
    assert found["models"] == [{"model": "smollm2", "path": None, "served_names": ["smollm2"]}]
    assert document(capsys, "Start", "up", "--port", "0")["models"][0]["model"] == "tandem-tiny"
    assert not state.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/no/such/model"), "cannot load the model /no/such/model"),
        (("--prefill", "1"), "cannot serve"),
        (("--tp", "3"), "--tp 3 does not fit the model"),
        (("--log-level", "LOUD"), "--log-level is 'LOUD'"),
        (("--name", "a/b"), "cannot be a cluster's name"),
        (("--transport", "pigeon"), "--transport is 'pigeon'"),
        (("--timeout", "0"), "--timeout is 0"),
        (("--disaggregation", "always", "--mixed", "1"), "--disaggregation always cannot work"),
    ],
)
def test_what_up_refuses_its_dry_run_refuses(
    capsys: pytest.CaptureFixture[str], state: Path, flags: tuple[str, ...], message: str
) -> None:
    code, out, error = run(capsys, "up", "--port", "0", *flags, "--dry-run")
    assert (code, out) == (Exit.USAGE, "")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not state.exists()


def test_a_port_or_a_name_that_is_taken(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, error = run(capsys, "up", "--port", port, "--grpc-port", "0", "--admin-port", "0", "--dry-run")
    assert code == Exit.USAGE
    assert f"port {port} on 127.0.0.1 is taken" in error
    with StateDir(state, "tandem").hold():
        code, _, error = run(capsys, "up", "--port", "0", "--dry-run")
        assert code == Exit.USAGE
        assert "cluster 'tandem' is running already" in error
    assert run(capsys, "up", "--port", "0", "--dry-run")[0] == 0


@pytest.mark.parametrize("command", [("up",), ("join", "127.0.0.1:1")])
def test_only_a_dry_run_prints_a_document(
    capsys: pytest.CaptureFixture[str], state: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("tandem.clusterctl.lifecycle.join._check", lambda *_: None)
    code, out, error = run(capsys, *command, "-o", "json")
    assert (code, out) == (Exit.USAGE, "")
    assert "only --dry-run prints a document" in error
    assert not state.exists()


def test_what_this_machine_would_give(
    capsys: pytest.CaptureFixture[str], state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: object, **named: object) -> None:
        raise AssertionError("it joins")

    monkeypatch.setattr(ray_start, "RayNodeProcess", started)
    token = tmp_path / "ray.token"
    token.write_text("0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        flags = ("join", address, "--token-file", str(token), "--hardware", "h100", "--cpus", "3", "--gpus", "0")
        found = document(capsys, "Join", *flags)
        wanted = {"address": address, "host": None, "cpus": 3, "gpus": 0, "hardware": "h100", "token_file": str(token)}
        assert {key: found[key] for key in wanted} == wanted
        code, out, error = run(capsys, *flags, "--dry-run")
        assert (code, error) == (0, "")
        assert out.splitlines() == [
            f"this machine would join {address}: 3 CPU of class h100", "nothing was started (--dry-run)"
        ]  # fmt: skip
    code, out, error = run(capsys, "join", address, "--dry-run")
    assert (code, out) == (Exit.FAILED, "")
    assert f"no cluster answers at {address}" in error
