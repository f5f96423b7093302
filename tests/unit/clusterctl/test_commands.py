"""Flags, exit codes and one-line errors of the command line, without a cluster."""

import dataclasses
import errno
import io
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
from rich.console import Console

from tandem.clusterctl import main as program
from tandem.clusterctl.admin_client import AdminClient
from tandem.clusterctl.inspect import status_view
from tandem.clusterctl.inspect.histograms import Scrape
from tandem.clusterctl.inspect.status_summary import overview
from tandem.clusterctl.lifecycle.up_flags import UpFlags
from tandem.controlplane.up_flag_map import FLAGS
from tandem.core.config import ClusterConfig, Disaggregation
from tandem.core.errors import ConfigError, PermissionDeniedError
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S
from tandem.kvtransfer.transports.registry import TRANSPORTS


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
        config=file, port=0, deterministic=False, kv_memory="64MiB", served_model_name=["a", "b"],
        disaggregation=Disaggregation.ALWAYS, prefill=2, engine="sim",
    )  # fmt: skip
    config = flags.to_config()
    assert (config.name, config.router.port, config.router.host) == ("f", 0, "::1")
    assert not config.worker.is_deterministic
    assert config.worker.engine == "sim"
    assert config.worker.kv_memory_bytes == 64 * 2**20
    assert config.model.served_names == ("a", "b")
    assert (config.router.disaggregation, config.pools.prefill) == (Disaggregation.ALWAYS, 2)


def test_roles_have_flags_of_their_own() -> None:
    flags = UpFlags(
        tp=2, decode_tp=4, kv_dtype="float32", prefill_kv_dtype="bfloat16", block_tokens=16, decode_block_tokens=8,
        prefill_kv_memory="1GiB", wire_codec="int8", wire_codec_below="always",
    )  # fmt: skip
    config = flags.to_config()
    assert (config.worker.tp, config.prefill.tp, config.decode.tp) == (2, None, 4)
    assert (config.worker.kv_dtype, config.prefill.kv_dtype, config.decode.kv_dtype) == ("float32", "bfloat16", None)
    assert (config.worker.block_tokens, config.decode.block_tokens) == (16, 8)
    assert (config.prefill.kv_memory_bytes, config.decode.kv_memory_bytes) == (2**30, None)
    assert (config.worker.wire_codec, config.worker.wire_codec_below_bytes_per_s) == ("int8", ALWAYS_BYTES_PER_S)
    slow = UpFlags(wire_codec="none", wire_codec_below="125MB").to_config().worker
    assert (slow.wire_codec, slow.wire_codec_below_bytes_per_s) == ("", 125e6)


def test_up_begins_again_with_another_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are constants: they come from the environment at the time their modules were loaded."""
    begun: list[tuple[str, str]] = []

    def begin_again(program: str, words: list[str]) -> NoReturn:
        begun.append((os.environ["TANDEM_PATIENCE"], words[0]))
        raise SystemExit(0)

    monkeypatch.setenv("TANDEM_PATIENCE", "1")
    monkeypatch.setattr("os.execv", begin_again)
    assert run(monkeypatch, "up", "--patience", "600", "--dry-run") == 0
    assert run(monkeypatch, "up", "--patience", "2.5", "--dry-run") == 0
    assert begun == [("600", sys.executable), ("2.5", sys.executable)]


def test_every_flag_of_a_setting_gives_one_that_exists() -> None:
    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(UpFlags)}
    assert flags - set(FLAGS) == {"--config", "--fetch", "--timeout", "--as-configured"}
    assert set(FLAGS) <= flags
    assert len(set(FLAGS.values())) == len(FLAGS)
    for setting in FLAGS.values():
        value: object = ClusterConfig()
        for name in setting.split("."):
            value = getattr(value, name)


def test_a_bad_size_names_its_flag() -> None:
    with pytest.raises(ConfigError, match="--wire-codec-below is 'slow'"):
        UpFlags(wire_codec_below="slow").to_config()
    with pytest.raises(ConfigError, match="--decode-kv-memory is 'lots'"):
        UpFlags(decode_kv_memory="lots").to_config()
    with pytest.raises(ConfigError, match="--kv-memory is 'lots'"):
        UpFlags(kv_memory="lots").to_config()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status"], 1, "no cluster 'tandem' is running here"),
        (["up", "--config", "/no/such/file.toml"], 2, "cannot read the configuration /no/such/file.toml"),
        (["up", "--model", "/no/such/model"], 2, "cannot load the model /no/such/model"),
        (["up", "--prefill", "1"], 2, "cannot serve"),
        (["up", "--log-level", "LOUD"], 2, "--log-level is 'LOUD'"),
        (["up", "--patience", "0.5"], 2, "--patience is 0.5: it makes bounds longer. Use 1 or more, or leave it out"),
        (["up", "--patience", "-1"], 2, "--patience is -1.0. Use 0 to 3600"),
        (["up", "--name", "a/b"], 2, "cannot be a cluster's name"),
        (["status", "--endpoint", "http://127.0.0.1:9"], 2, "cannot read the admin key"),
        (["status", "--endpoint", "http://10.0.0.7:9"], 2, "--endpoint http://10.0.0.7:9 is on another machine"),
        (["status", "--endpoint", "http://127.0.0.1.nip.io:9"], 2, "is on another machine"),
        (["status", "--endpoint", "http://localhost@10.0.0.7:9"], 2, "is on another machine"),
        (
            ["status", "--endpoint", "http://127.0.0.1:9", "--admin-key-file", "/bin/sh"],
            2,
            "it holds no key",
        ),
        (["key", "create", "--tenant", "a", "--expires", "soon"], 2, "--expires is 'soon'"),
        (["status", "--endpoint", "nonsense", "--admin-key-file", "/dev/null"], 1, "no cluster answers at nonsense"),
        (["down", "--endpoint", "http://::1:8002", "--admin-key-file", "/dev/null"], 2, "--endpoint is 'http://::1:"),
        (["up", "--model", "\udcff"], 2, "--model is '\\udcff': that is no UTF-8 text"),
        (
            ["route", "explain", "\udcff", "--endpoint", "http://127.0.0.1:9", "--admin-key-file", "/dev/null"],
            2,
            "cannot send the given text: it is not UTF-8 text",
        ),
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


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "fsync", full)
    assert run(monkeypatch, "up", "--engine", "sim", "--port", "0") == 2
    error = capsys.readouterr().err
    assert error == (
        "clusterctl: the cluster cannot run: No space left on device. "
        "Make room, or choose another place with --state-dir.\n"
    )


def test_a_taken_port_is_found_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(monkeypatch, "up", "--port", str(port), "--grpc-port", "0", "--model", "no/such-model") == 2
    assert f"port {port} on 127.0.0.1 is taken" in capsys.readouterr().err


def test_what_the_admin_port_refuses_is_said_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("some-key")
    why = "the API key tdk-1 may not do this: it lacks the scope admin. Use one that has it."
    body = {"error": {"code": "insufficient_permissions", "message": why}}
    with AdminClient("http://admin", tmp_path / "key") as admin:
        admin._http = httpx.Client(
            base_url="http://admin", transport=httpx.MockTransport(lambda request: httpx.Response(403, json=body))
        )
        with pytest.raises(PermissionDeniedError, match="it lacks the scope admin"):
            admin.status()


@pytest.mark.parametrize("arguments", [["up", "--porrt", "3"], ["status", "--xml"], ["up", "--prefill", "two"]])
def test_wrong_usage_ends_with_2(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    assert run(monkeypatch, *arguments) == 2


def test_the_help_names_every_transport(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "up", "--help") == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"auto, or one of {', '.join(TRANSPORTS)}." in words


def test_the_nearest_key_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[router]\nprot = 1\n")
    assert run(monkeypatch, "up", "--config", str(file)) == 2
    assert f"unknown key 'prot' in [router] of {file}. The nearest known key is 'port'." in capsys.readouterr().err


STATUS = {
    "cluster": "c", "model": "m", "served_names": ["a", "b"], "is_ready": False, "missing": ["a decode worker"],
    "router": {"id": "router-0", "http": 8000, "grpc": 8001, "host": "127.0.0.1", "in_flight": 3},
    "admission": {
        "waiting": 7, "refused": {"late": 12, "budget": 1},
        "models": [
            {"waiting": 7, "predicted_wait_s": 0.44, "classes": {"chat": 6, "": 1},
             "tenants": [{"tenant": "acme", "waiting": 2}, {"tenant": "beta", "waiting": 5}]},
            {"waiting": 0, "predicted_wait_s": 0.0, "classes": {}, "tenants": []},
        ],
    },
    "workers": [
        {
            "worker": "prefill-0", "role": "prefill", "is_connected": True, "is_registered": True, "pid": 4711,
            "running_requests": 2, "blocks": [{"total": 90, "free": 50, "cached": 33, "request": 7}],
            "tp": 2, "block_tokens": 16, "kv_dtype": "bfloat16", "protocol": "2.0", "transports": ["shm", "tcp"],
            "codecs": ["int8", "fp8"], "wire_codec": "int8", "wire_codec_below_bytes_per_s": 125e6,
        },
        {"worker": "decode-0", "is_registered": False},
        {"worker": "decode-1", "trouble": "refuses the secret"},
    ],
    "pairs": [
        *({"prefill": "prefill-0", "decode": f"decode-{i}", "form": "exact"} for i in range(5)),
        {"prefill": "prefill-0", "decode": "decode-9", "form": "re-blocked 16 to 8"},
    ],
    "refused_pairs": [{"prefill": "prefill-0", "decode": "decode-0", "why": "dtypes differ"}],
}  # fmt: skip


METRICS = """
tandem_time_to_first_token_seconds_bucket{le="0.1"} 2
tandem_time_to_first_token_seconds_bucket{le="0.2"} 4
tandem_time_to_first_token_seconds_bucket{le="+Inf"} 4
tandem_prompt_tokens_total 400
tandem_cached_prompt_tokens_total 100
tandem_requests_total{api="chat",outcome="ok"} 4
"""


def test_status_as_a_table_fits_a_screen() -> None:
    text = io.StringIO()
    found = STATUS | overview(STATUS, Scrape.parse(METRICS))
    status_view.show(found, Console(file=text, width=120))
    shown = text.getvalue()
    for words in (
        "health          down, 4 warnings below",
        "served as a, b",
        "no, missing: a decode worker",
        "HTTP            127.0.0.1:8000",
        "3 in flight",
        "waiting         7 (beta 5, acme 2; class chat 6, none 1), a new one about 0.4 s",
        "refused         budget 1, late 12",
        "figures         TTFT p50 100.0 ms, p99 198.0 ms; ITL p50 –, p99 –; prefix hits 25%; 4 requests",
        "lapsed",
        "warning: missing: a decode worker (`clusterctl logs up` shows the reason)",
        "warning: decode-1: refuses the secret (`clusterctl logs decode-1 --level WARNING`)",
        "warning: never paired: prefill-0 and decode-0: dtypes differ",
    ):
        assert words in shown, words
    pool, row = [line.split() for line in shown.splitlines() if line.startswith("prefill")]
    assert pool == ["prefill", "1/1", "2", "0", "0", "8%"]
    assert row == ["prefill-0", "prefill", "up", "–", "4711", "2", "–", "7", "33", "90"]
    assert "paired, exact" not in shown
    status_view.show_wide(found, Console(file=text, width=120))
    wide = text.getvalue().removeprefix(shown)
    kv = [line for line in wide.splitlines() if line.startswith("prefill-0")][1]
    assert kv.split() == ["prefill-0", "2", "16", "bfloat16", "2.0", "shm,", "tcp", "int8,", "fp8", "int8", "below",
                          "125", "MB/s"]  # fmt: skip
    assert "paired, exact: prefill-0 to decode-0, " in wide
    assert "prefill-0 to decode-3 and 1 more\n" in wide
    assert "paired, re-blocked 16 to 8: prefill-0 to decode-9\n" in wide


def test_a_cluster_is_well_degraded_or_down() -> None:
    scrape = Scrape.parse("")
    assert overview({"is_ready": True}, scrape)["health"] == "ok"
    assert overview({"is_ready": False, "missing": ["x"]}, scrape)["health"] == "down"
    full = {"worker": "d", "is_registered": True, "blocks": [{"total": 100, "free": 1, "cached": 0}]}
    found = overview({"is_ready": True, "workers": [full]}, scrape)
    assert found["health"] == "degraded"
    assert [warning["what"] for warning in found["warnings"]] == ["d has 99% of its KV in use"]
    failing = {"worker": "d", "is_registered": True, "is_connected": True, "state": "ready", "breaker": "open"}
    shunned = overview({"is_ready": True, "workers": [failing]}, scrape)
    assert shunned["health"] == "degraded"
    assert [warning["what"] for warning in shunned["warnings"]] == [
        "d gets no requests for a while, as they failed there"
    ]
    assert [status_view.state(failing | {"breaker": name}) for name in ("open", "half_open", "closed")] == [
        "breaker open", "up", "up",
    ]  # fmt: skip
    pair = {"prefill": "p", "decode": "d", "why": "revision differs: initial and r2"}
    workers = [{"worker": "p", "revision": "initial"}, {"worker": "d", "revision": "r2"}]
    rolling = overview({"is_ready": True, "workers": workers, "refused_pairs": [pair] * 4}, scrape)
    assert [warning["what"] for warning in rolling["warnings"]] == ["workers of initial and r2 serve side by side"]
    waits = {"is_ready": True, "admission": {"models": [{"waiting": 3, "predicted_wait_s": 2.0}]}}
    assert overview(waits, scrape)["warnings"][0]["what"] == "3 requests wait, a new one about 2.0 s"


@pytest.mark.parametrize("status", [{}, {"workers": None, "router": None}, {"workers": [{}]}])
def test_status_of_an_unknown_router_is_dashes(status: dict[str, object]) -> None:
    text = io.StringIO()
    status_view.show(status, Console(file=text, width=120))
    assert "–" in text.getvalue()
