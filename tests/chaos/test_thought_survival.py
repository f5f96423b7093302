"""Workers are killed in the middle of thoughts that have a budget: these end at the same token as if nothing had
happened, and so do the answers behind them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.strikes import Cell, strike_until_hit
from tests.chaos.survivors import Bodies, undisturbed
from tests.thinking_model import thinking_model
from tools.running_cluster import Cluster, running

EXACT = ("--threads", "1", "--deterministic", "--dtype", "float32")
MAX_TOKENS = 300
BUDGET = 150


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    model: Path = thinking_model(tmp_path_factory.mktemp("model"))
    return f'[model]\npath = "{model}"\nserved_names = ["thinking"]\n'


@pytest.fixture(scope="module")
def cluster(config: str) -> Iterator[Cluster]:
    with running("--prefill", "2", "--decode", "2", "--disaggregation", "always", *EXACT, config=config) as found:
        yield found


@pytest.fixture(scope="module")
def calm(config: str) -> Iterator[Cluster]:
    """One worker that is not disturbed: its answers are right."""
    with running("--mixed", "1", *EXACT, config=config) as found:
        yield found


def asks(salt: int) -> Bodies:
    """Answers behind thoughts of every budget, whole and streamed, one of them by a schema."""
    words = " ".join(f"word {number + salt}" for number in range(70))
    plain: dict[str, Any] = {
        "model": "thinking", "messages": [{"role": "user", "content": words}], "max_tokens": MAX_TOKENS, "seed": 9,
        "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.8, "ignore_eos": True,
        "thinking_token_budget": BUDGET,
    }  # fmt: skip
    whole = {key: value for key, value in plain.items() if not key.startswith("stream")}
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 40}
    return {
        "long": plain,
        "short": {**plain, "thinking_token_budget": 1},
        "logprobs": {**plain, "frequency_penalty": 0.6, "logprobs": True, "seed": 2 + salt},
        "n=2": {**whole, "n": 2, "seed": 8 + salt},
        "schema": {**plain, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
    }


@pytest.mark.drawn(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_killed_in_the_middle_of_a_thought(cluster: Cluster, calm: Cluster, role: str) -> None:
    bodies = asks(len(role))
    right = undisturbed(calm, bodies)
    for kind, answer in right.items():
        assert all(choice.thought and choice.text for choice in answer.choices.values()) or kind == "short"
    strike_until_hit(cluster, Cell(role, role, "kill host"), bodies, right)
