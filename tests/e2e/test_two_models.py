"""One cluster, two models: `[[models]]` in the configuration, workers of both, requests routed by name."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from tandem.engine.sim.arithmetic import expected_tokens
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

PROMPT = [(7 * k) % 3000 + 600 for k in range(150)]
ORACLE = expected_tokens(PROMPT, 30, 4096, eos_token_ids=(1,))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("two")
    other = folder / "other-tiny"
    other.mkdir()
    for file in MODEL.iterdir():
        (other / file.name).symlink_to(file)
    # Another revision: what a worker makes of the model's files differs.
    (other / "config.json").unlink()
    (other / "config.json").write_text((MODEL / "config.json").read_text() + "\n")
    config = (
        f'[model]\npath = "{MODEL}"\n[pools]\nprefill = 1\ndecode = 1\n[worker]\nengine = "sim"\n'
        f'[[models]]\npath = "{other}"\nserved_names = ["second", "alias"]\nprefill = 1\ndecode = 1\n'
    )
    with running("--disaggregation", "always", config=config) as cluster:
        wait_for(lambda: not cluster.status()["missing"], 30, "both models are served")
        yield cluster


def test_each_name_is_answered_by_its_own_workers(cluster: Cluster) -> None:
    text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(ORACLE)
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    ours = {"tandem-tiny": "prefill-0", "second": "prefill-m2-0", "alias": "prefill-m2-0"}
    for name, worker in ours.items():
        for _ in range(2):
            headers = {"x-tandem-timing": "1"}
            answer = httpx.post(f"{cluster.api}/v1/completions", json={**body, "model": name}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            assert answer.json()["choices"][0]["text"] == text
            assert json.loads(answer.headers["x-tandem-timing"])["prefill"] == worker
    assert cluster.post("/v1/completions", {**body, "model": "other-tiny"})[0] == 404


def test_the_models_are_strangers_to_each_other(cluster: Cluster) -> None:
    status = cluster.status()
    assert {(pair["prefill"], pair["decode"]) for pair in status["pairs"]} == {
        ("prefill-0", "decode-0"), ("prefill-m2-0", "decode-m2-0"),
    }  # fmt: skip
    assert {worker["worker"]: worker["model"] for worker in status["workers"]} == {
        "prefill-0": "tandem-tiny", "decode-0": "tandem-tiny",
        "prefill-m2-0": "other-tiny", "decode-m2-0": "other-tiny",
    }  # fmt: skip
    assert [model["served_names"] for model in status["models"]] == [["tandem-tiny"], ["second", "alias"]]
