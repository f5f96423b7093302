"""The README's commands and its Python example work as printed, but for the ports, and print what it says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from tools.running_cluster import START_TIMEOUT_S, STOP_TIMEOUT_S, Cluster
from tools.waiting import wait_for

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PRINTED = "http://127.0.0.1:8000"


BLOCKS: list[str] = re.findall(r"```console\n\$ (.*?)```", README, re.DOTALL)


def shape(text: str) -> set[str]:
    """Lines without what differs from run to run: numbers, and the folder that the clone is in."""
    text = re.sub(r"[\d.]+", "N", re.sub(r"\S*/models/", "models/", text)).replace(" threads ", " thread ")
    return {line.strip() for line in text.splitlines()}


def kinds(value: Any) -> Any:
    """JSON with the type of each value in its place."""
    if isinstance(value, dict):
        return {name: kinds(one) for name, one in value.items()}
    return [kinds(one) for one in value] if isinstance(value, list) else type(value).__name__


def test_make_serve_says_what_is_printed_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.startswith("make serve\n")]
    printed = shape(block.partition("\n")[2])
    flags = f"--port 0 --grpc-port 0 --admin-port 0 --state-dir {tmp_path}"
    with (tmp_path / "out").open("w+") as out:
        made = subprocess.Popen(
            ["make", "-s", "serve", f"ARGS={flags}"], cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:

            def missing() -> set[str]:
                assert made.poll() is None, (tmp_path / "out").read_text()
                return printed - shape((tmp_path / "out").read_text())

            wait_for(lambda: not missing(), START_TIMEOUT_S, "it prints what the README shows")
            os.killpg(made.pid, signal.SIGINT)
            made.wait(STOP_TIMEOUT_S)
        finally:
            if made.poll() is None:
                os.killpg(made.pid, signal.SIGKILL)
                made.wait()
    assert "everything is stopped" in (tmp_path / "out").read_text()


def test_curl(cluster: Cluster) -> None:
    (block,) = [block for block in BLOCKS if block.startswith("curl")]
    command, _, printed = block.rpartition("\n{")
    assert PRINTED in command
    done = subprocess.run(
        ["bash", "-c", command.replace(PRINTED, cluster.api)], capture_output=True, timeout=60, check=True
    )
    answer, expected = json.loads(done.stdout), json.loads("{" + printed)
    assert kinds(answer) == kinds(expected)
    assert answer["usage"] == expected["usage"]
    assert len(answer["choices"][0]["text"]) > 10


def test_python(cluster: Cluster) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert PRINTED in program
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.replace(PRINTED, cluster.api), "README.md", "exec"), {})
    assert len(printed.getvalue()) > 5
