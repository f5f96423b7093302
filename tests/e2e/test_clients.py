"""Real clients, unchanged, each a program in the environment of `make clients`, against Tandem.

What an agent does is exact: its model is scripted, behind a real router. What has a form is written by a real engine
whose model knows nothing: grammars alone make its answers what the client asked for.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.rpc.v1 import worker_pb2 as w
from tests.e2e.clients.scenes import SCENES
from tests.integration.router.house import RouterHarness, builder
from tests.integration.router.scripted_worker import Script
from tests.integration.router.tool_models import TEMPLATES, Said, tool_model
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, running

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.stem for path in Path(__file__).with_name("clients").glob("*_client.py"))
REQUIREMENTS = Path(__file__).with_name("clients") / "requirements.txt"
PASSED = "passed: "
TURN = "<|im_start|>assistant\n"
CONTEXT_TOKENS = 16384
"""Prompts of an agent that writes code are long."""


class Scenes:
    """A model that answers by the scene whose question its prompt has."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def answer(self, submit: w.Submit, choice: int) -> list[int]:
        prompt = self._said.prompt(submit)
        turn = prompt.count(TURN) - 1
        turns = next((scene.turns for scene in SCENES if scene.question in prompt), ())
        self._said.texts = [turns[turn] if 0 <= turn < len(turns) else f"There is no turn {turn} in this scene."]
        return self._said.answer(submit, choice)


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter with all clients, which is made here unless `.ci/run` has made it."""
    subprocess.run(["make", "clients", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    return ROOT / "build" / "clients" / "bin" / "python"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    folder = tmp_path_factory.mktemp("clients")
    model = replace(tool_model(folder), served_names=("scripted",))
    with builder(folder) as make:
        house = make(models=(model,), script=Script(answer=Scenes(Said(model)).answer), start=False)
        for worker in house.workers.values():
            worker.max_model_len, worker.num_blocks = CONTEXT_TOKENS, CONTEXT_TOKENS // worker.block_tokens
        house.start()
        house.wait_ready()
        yield house


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = f"""[model]
path = "{MODEL}"
chat_template = "{TEMPLATES / "hermes.jinja"}"
reasoning_format = "none"
served_names = ["tools"]
dtype = "float32"
"""
    with running("--prefill", "1", "--decode", "1", config=config) as cluster:
        yield cluster


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_does_all_that_it_can(
    program: str, python: Path, scripted: RouterHarness, cluster: Cluster, tmp_path: Path
) -> None:
    variables = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1", "NO_PROXY": "*",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would ask the network for prices, and again, and again
        "SCRIPTED_URL": scripted.url, "CLUSTER_URL": cluster.api,
    }  # fmt: skip
    done = subprocess.run(
        [python, "-m", f"tests.e2e.clients.{program}"], cwd=ROOT, env=variables, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    passed = [line.partition(PASSED)[2] for line in done.stdout.splitlines() if PASSED in line]
    assert ", ".join(passed) == _documented(program)


def _documented(program: str) -> str:
    """The features of a program on the page, whose versions have to be those that are installed."""
    page = (ROOT / "docs" / "tools.md").read_text().split("## Clients")[1]
    package = program.removesuffix("_client").replace("_", "-")
    for packages, features in re.findall(r"^\| (`.+?) \| (.+) \|$", page, re.MULTILINE):
        versions = re.findall(r"`([\w-]+)` (\S+?)(?:,|$)", packages)
        if versions[0][0] in (package, f"{package}-openai", f"{package}-slim"):
            installed = REQUIREMENTS.read_text().splitlines()
            assert all(f"{name}=={version}" in installed for name, version in versions), versions
            return str(features)
    raise AssertionError(f"docs/tools.md has no row of {package}")
