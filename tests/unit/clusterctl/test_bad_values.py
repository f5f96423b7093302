"""Values that no command can use: each ends with 2 and one line that names the error, before anything is sent."""

import json
from pathlib import Path

import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.loadgen.client import Target

LOAD = ("--rate", "3", "--isl", "1500", "--osl", "100")
TABLE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FILES: dict[str, bytes] = {
    "short.csv": f"{TABLE}2023-11-16 18:17:03.97,4808\n".encode(),
    "long.csv": TABLE.encode() + b"2" * 200_000,
    "list.jsonl": b"[1, 2]\n",
    "number.jsonl": b"17\n",
    "text.jsonl": b'{"timestamp": "now", "input_length": 1, "output_length": 1, "hash_ids": []}\n',
    "endless.jsonl": b'{"timestamp": 1, "input_length": Infinity, "output_length": 1, "hash_ids": []}\n',
    "moment.csv": TABLE.encode() + b"2023-11-16 18:17:03.97,480,5\n2023-11-16 18:17:04.97,480,5\n",
    "key": b"\xff\xfe\x00secret",
    "row.json": json.dumps({"decode_steps": [{"batch": 1, "s": 0.1}]}).encode(),
    "zero.json": json.dumps({"prefill_tokens_per_s": 0}).encode(),
    "word.json": json.dumps({"prefill_tokens_per_s": "fast"}).encode(),
    "none.json": json.dumps({"kv_tokens": None}).encode(),
    "flat.json": json.dumps({"prefill_steps": 5}).encode(),
}
CASES: list[tuple[list[str], str]] = [
    *((["bench", "--url", url], f"{url!r} is not a URL") for url in ("http://h:99999", "http://h:80x", "http://[::1")),
    *((["bench", "--url", url], f"{url!r} is not the URL of an API") for url in ("h:80", "ftp://h", "http://", "h")),
    (["replay", "moment.csv", "--url", "http://h:80x"], "Write it like http://"),
    *(
        ([*command, name], f"the trace {name} cannot be read")
        for name in ("short.csv", "long.csv", "list.jsonl", "number.jsonl", "text.jsonl", "endless.jsonl")
        for command in (["replay"], ["plan", "--trace"], ["simulate", "splits", "--trace"])
    ),
    (["plan", *LOAD, "--calibration", "row.json"], "there is no 'context'"),
    (["plan", *LOAD, "--calibration", "zero.json"], "prefill_tokens_per_s is 0"),
    (["plan", *LOAD, "--calibration", "word.json"], "a value that is not a number"),
    (["plan", *LOAD, "--calibration", "none.json"], "a value that is not a number"),
    (["simulate", "splits", *LOAD, "--calibration", "flat.json"], "a value that is not a number"),
    (["up", "--model", "~nosuchuser/m"], "~nosuchuser names no user"),
    (["status", "--state-dir", "~nosuchuser"], "~nosuchuser names no user"),
    (["top", "--every", "inf"], "--every is inf"),
    (["slo", "set", "chat", "--ttft", "nan"], "--ttft is nan"),
    (["slo", "set", "chat", "--itl=-1", "--dry-run"], "--itl is -1"),
    (["slo", "set", "a b", "--dry-run"], "'a b' cannot be the name of a class"),
    (["key", "create", "--tenant", "a b", "--dry-run"], "the tenant is 'a b'"),
    (["key", "create", "--tenant", "a", "--priority", "1000", "--dry-run"], "priority is 1000"),
    (["top", "--every", "nan"], "--every is nan"),
    (["top", "--follow", "--once"], "--follow and --once exclude each other"),
    (["bench", "--url", "http://127.0.0.1:1", "--api-key-file", "key"], "key holds no API key"),
    (["bench", "--ttft", "inf"], "--ttft is inf"),
    (["plan", *LOAD, "--hardware", "h100=inf"], "the price of 'h100=inf' is not a number above 0"),
    (["plan", *LOAD, "--price", "inf"], "--price is inf"),
    (["plan", *LOAD, "--headroom", "inf"], "--headroom is inf"),
    (["plan", *LOAD, "--slo-ttft", "inf"], "--slo-ttft is inf"),
    (["simulate", "map", "--load", "inf"], "--load is inf"),
    (["plan", "--trace", "moment.csv", "--window", "0.001"], "there is no rate to plan for"),
    (["bench", "--url", "http://127.0.0.1:1", "--out", "none/x.json"], "--out is none/x.json: there is no such folder"),
    (["bench", "--url", "http://127.0.0.1:1", "--out", "."], "that is a folder"),
    (["bench", "--url", "http://127.0.0.1:1", "--plot", "none/x.svg"], "--plot is none/x.svg"),
    (["simulate", "splits", *LOAD, "--picture", "none/x.svg"], "--picture is none/x.svg: there is no such folder"),
]


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=[" ".join(arguments) for arguments, _ in CASES])
def test_what_cannot_be_used_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    code = program.run(arguments)
    out, error = capsys.readouterr()
    assert (code, out) == (Exit.USAGE, "")
    assert message in error
    assert len(error.splitlines()) == 1


def test_where_requests_go() -> None:
    found = Target.of("http://[::1]:8000/api/v1/")
    assert (found.host, found.port, found.path, found.tls) == ("::1", 8000, "/api/v1/completions", None)
    secure = Target.of("https://h")
    assert (secure.host, secure.port) == ("h", 443)
    assert secure.tls is not None
    assert secure.tls.check_hostname
