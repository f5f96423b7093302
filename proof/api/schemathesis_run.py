"""One run of schemathesis against a server, as a child process: its checks, and their result."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance",
)  # fmt: skip
"""Every answer is one that the document has, with that body, and none is a failure of the server."""
_SETTINGS = """[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503", "504"]
"""
"""503 and 504 answer a request that allows itself too little time; the caller checks how many there were."""
_CASES = re.compile(r"(\d+) generated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`cases` were sent; `report` is what schemathesis printed, with every failure and how to repeat it."""

    passed: bool
    cases: int
    report: str


def run(url: str, *options: str, seed: int, timeout_s: float, checks: Sequence[str] = CHECKS) -> Outcome:
    """Send the server at `url` requests that its own document allows and others; raises TimeoutExpired."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{url}/openapi.json",
        "--checks", ",".join(checks), "--seed", str(seed), "--request-timeout", "60", "--continue-on-failure",
        "--warnings", "off", "--suppress-health-check", "all", "--generation-database", "none", *options,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="td-") as folder:  # it leaves what it found where it runs
        Path(folder, "schemathesis.toml").write_text(_SETTINGS)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    found = _CASES.search(done.stdout)
    return Outcome(
        passed=done.returncode == 0, cases=int(found[1]) if found else 0, report=f"{done.stdout}\n{done.stderr}"
    )
