"""docs/operate/first-hour.md: what a new operator does on this machine works as printed, but for the ports, and for the
model where that cannot be fetched."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.controlplane.model_catalog import BUNDLED, SMOLLM2
from tests.e2e.pages import commands
from tests.integration.engine.real_model import fetched
from tools.running_cluster import START_TIMEOUT_S, STOP_TIMEOUT_S
from tools.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PRINTED = "http://127.0.0.1:8000"


@dataclass
class Served:
    """The cluster that `make serve` runs. `variables`: in which it is found."""

    process: subprocess.Popen[bytes]
    out: Path
    variables: dict[str, str]

    @property
    def output(self) -> str:
        return self.out.read_text()

    def api(self) -> str:
        """Return its address, once it is ready."""
        assert self.process.poll() is None, self.output
        found = re.search(r"  ready +API +(\S+)/v1$", self.output, re.MULTILINE)
        return found[1] if found else ""


@contextlib.contextmanager
def served(command: str, folder: Path) -> Iterator[Served]:
    model, _ = fetched()
    variables = {**os.environ, "TANDEM_STATE_DIR": str(folder)}
    if model is not None:
        variables["TANDEM_MODELS_DIR"] = str(model.parent)
    flags = "ARGS=--port 0 --grpc-port 0 --admin-port 0"
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            [*command.split(), flags], cwd=ROOT, env=variables, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Served(process, folder / "out", variables)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ran(command: str, api: str, here: Served) -> str:
    """Return its output, of either stream; it has to end well."""
    command = command.replace(PRINTED, api)
    if fetched()[0] is None:
        command = command.replace(SMOLLM2.name, BUNDLED)
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=here.variables, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout or done.stderr


def test_the_first_part_works_as_printed(tmp_path: Path) -> None:
    first, *others = commands("first-hour", "On this machine")
    assert first == "make serve"
    with served(first, tmp_path) as here:
        api = wait_for(here.api, START_TIMEOUT_S, "it serves")
        told = {command: ran(command, api, here) for command in others}
        os.killpg(here.process.pid, signal.SIGINT)
        here.process.wait(STOP_TIMEOUT_S)
        assert "everything is stopped" in here.output
    names = [command.removeprefix(".venv/bin/").split()[:2] for command in others]
    assert names == [
        ["curl", "-s"], *(["clusterctl", name] for name in ("chat", "status", "top", "net", "events")),
        *(["clusterctl", name] for name in ("scale", "scale", "get", "scale")),
    ]  # fmt: skip
    asked, talked, *shown = told.values()
    answer = json.loads(asked)["choices"][0]["message"]["content"]
    assert answer == "The capital of France is Paris." or (answer and fetched()[0] is None)
    assert talked.strip() == answer.strip()
    status, top, net, events, dry, _, workers, _ = shown
    assert re.match(r"health +ok\n", status)
    assert all(name in one for name in ("prefill-0", "decode-0") for one in (status, top, events))
    assert net
    assert dry
    assert "decode-1" in workers
