"""The README's curl line and Python example work as printed, but for the port."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

from tools.running_cluster import Cluster

README = (Path(__file__).parents[2] / "README.md").read_text()
PRINTED = "http://127.0.0.1:8000"


def test_curl(cluster: Cluster) -> None:
    (command,) = [block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if block.startswith("curl")]
    assert PRINTED in command
    done = subprocess.run(
        ["bash", "-c", command.replace(PRINTED, cluster.api)], capture_output=True, timeout=60, check=True
    )
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 1


def test_python(cluster: Cluster) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert PRINTED in program
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program.replace(PRINTED, cluster.api), "README.md", "exec"), {})
    assert len(printed.getvalue()) > 5
