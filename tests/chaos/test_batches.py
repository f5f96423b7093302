"""kill -9 of the router, of workers, of Redis and of everything while a batch runs: it ends complete, each request
once."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types import Batch
from tokenizers import Tokenizer

from tandem.engine.sim.arithmetic import expected_tokens
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, is_alive, kill, running
from tools.waiting import wait_for

REQUESTS = 240
TOKENS = 12
CONFIG = """
[pools]
prefill = 1
decode = 1

[worker]
engine = "sim"

[worker.sim]
decode_step_s = 0.02
"""


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    config = tmp_path / "cluster.toml"
    config.write_text(CONFIG)
    return ("--config", str(config), "--model", str(MODEL), "--threads", "1")


def prompt(number: int) -> list[int]:
    return [600 + (37 * number + 7 * k) % 3000 for k in range(20 + number % 50)]


def submit(client: openai.OpenAI) -> Batch:
    body = {"model": "tandem-tiny", "max_tokens": TOKENS, "temperature": 0}
    head = {"method": "POST", "url": "/v1/completions"}
    lines = [{"custom_id": f"id-{n}", **head, "body": {**body, "prompt": prompt(n)}} for n in range(REQUESTS)]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


@contextlib.contextmanager
def client_of(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.api}/v1", api_key="none", max_retries=0) as client:
        yield client


def look(client: openai.OpenAI, batch: str) -> Batch | None:
    """None while no router answers."""
    try:
        return client.batches.retrieve(batch)
    except (openai.APIConnectionError, openai.InternalServerError, httpx.HTTPError):
        return None


def await_answers(client: openai.OpenAI, batch: str, count: int) -> None:
    def enough() -> bool:
        found = look(client, batch)
        return found is not None and found.request_counts is not None and found.request_counts.completed >= count

    wait_for(enough, 60, f"{count} answers")


def check_complete(client: openai.OpenAI, batch: str) -> None:
    def over() -> Batch | None:
        found = look(client, batch)
        return found if found is not None and found.status in ("completed", "failed", "expired", "cancelled") else None

    found: Batch = wait_for(over, 120, "the batch is over")
    assert (found.status, found.error_file_id) == ("completed", None)
    assert found.request_counts is not None
    assert found.request_counts.to_dict() == {"total": REQUESTS, "completed": REQUESTS, "failed": 0}
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in client.files.content(found.output_file_id or "").text.splitlines()
    ]
    assert [line["custom_id"] for line in lines] == [f"id-{n}" for n in range(REQUESTS)]
    decode = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode
    for number, line in enumerate(lines):
        tokens = expected_tokens(prompt(number), TOKENS, 4096, eos_token_ids=(1,))
        assert line["response"]["body"]["choices"][0]["text"] == decode(tokens), number


def _pid(cluster: Cluster, name: str) -> int | None:
    """None while the router, new itself, serves without it: short prompts need no prefill worker."""
    with contextlib.suppress(OSError):  # one port of the new router may be open before the other
        if name == "router":
            return int(cluster.status()["router"]["pid"])
        return next(iter(cluster.pids().get(name, ())), None)
    return None


def test_one_after_the_other_dies(flags: tuple[str, ...]) -> None:
    with running(*flags) as cluster, client_of(cluster) as client:
        batch = submit(client).id
        for answers, victim in ((20, "router"), (50, "decode-0"), (80, "router"), (110, "prefill-0")):
            await_answers(client, batch, answers)
            pid: int = wait_for(lambda name=victim: _pid(cluster, name), what=f"{victim} is connected")  # type: ignore[misc]
            kill(pid)
            wait_for(lambda pid=pid: not is_alive(pid), what=f"{victim} is gone")  # type: ignore[misc]
        await_answers(client, batch, 140)
        (redis,) = [c.pid for c in psutil.Process(cluster.process.pid).children() if "redis" in c.name()]
        kill(redis)
        check_complete(client, batch)


def test_everything_dies(flags: tuple[str, ...], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    batch = ""
    for answers in (30, 120):
        with contextlib.suppress(_EverythingDiedError), running(*flags, folder=state) as cluster:
            with client_of(cluster) as client:
                batch = batch or submit(client).id
                await_answers(client, batch, answers)
            everybody = [child.pid for child in psutil.Process(cluster.process.pid).children(recursive=True)]
            kill(cluster.process.pid)
            for pid in everybody:
                with contextlib.suppress(ProcessLookupError):
                    kill(pid)
            wait_for(lambda pids=everybody: not any(is_alive(pid) for pid in pids), what="all are gone")  # type: ignore[misc]
            raise _EverythingDiedError
    with running(*flags, folder=state) as cluster, client_of(cluster) as client:
        check_complete(client, batch)


class _EverythingDiedError(Exception):
    pass
