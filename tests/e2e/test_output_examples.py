"""Examples of the pages about structured outputs and tools, as printed: the commands, and what SmolLM2 answers."""

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.real_model import smollm2
from tools.running_cluster import Cluster, running

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("structured-outputs", "tools")


def examples(page: str) -> Iterator[tuple[str, str]]:
    """Commands of a page, each with the JSON that stands behind it."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    for (kind, text), (_, after) in pairwise(blocks):
        if kind == "bash" and text.startswith("curl"):
            yield text, after


EXAMPLES = {f"{page} {number}": example for page in PAGES for number, example in enumerate(examples(page))}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("--mixed", "1", "--model", str(smollm2()), "--max-model-len", "2048", "--kv-memory", "64MiB") as made:
        yield made


def test_every_page_has_examples() -> None:
    assert list(EXAMPLES) == ["structured-outputs 0", "structured-outputs 1", "tools 0"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_works_as_printed(cluster: Cluster, name: str) -> None:
    command, printed = EXAMPLES[name]
    assert "localhost:8000" in command
    here = command.replace("localhost:8000", cluster.api.removeprefix("http://"))
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, check=True, timeout=120)
    message: dict[str, Any] = json.loads(done.stdout)["choices"][0]["message"]
    calls = message.get("tool_calls")
    found = calls[0]["function"] if calls else read(message["content"])
    assert found == json.loads(printed)


def read(content: str) -> Any:
    """JSON that a model wrote with blanks of its own, or a text."""
    return json.loads(content) if content.startswith("{") else content
