"""Several models behind one API: requests go to workers of the model that they name, with its own tokenizer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from tandem.core.config import ServedModel
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tests.integration.router.house import MODEL, TINY, RouterHarness, builder

SMALL_CONTEXT = 96


def other_model(folder: Path) -> ServedModel:
    """The bundled model's tokenizer with another chat template and a shorter context."""
    folder.mkdir()
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    settings["chat_template"] = "other: {{ messages[-1].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text((MODEL / "tokenizer.json").read_text())
    config = json.loads((MODEL / "config.json").read_text()) | {"max_position_embeddings": SMALL_CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return ServedModel(name="other", model_dir=str(folder), served_names=("other", "second"))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    """Two models, a pair of workers each."""
    folder = tmp_path_factory.mktemp("models")
    with builder(folder) as make:
        house = make(models=(TINY, other_model(folder / "other")))
        house.wait_ready()
        yield house


def asked(house: RouterHarness) -> list[str]:
    """Workers that requests of clients went to since the last call, sorted."""
    names = [name for name, worker in sorted(house.workers.items()) for _ in worker.submitted]
    for worker in house.workers.values():
        worker.submits.clear()
    return names


def test_models_are_listed_and_named(house: RouterHarness) -> None:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tandem-tiny", "tiny", "other", "second"]
        assert client.models.retrieve("second").id == "second"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("third")
    lengths = {m["id"]: (m["root"], m["max_model_len"]) for m in httpx.get(f"{house.url}/v1/models").json()["data"]}
    assert lengths["tiny"] == ("tandem-tiny", 4096)
    assert lengths["second"] == ("other", SMALL_CONTEXT)


@pytest.mark.parametrize(
    ("names", "workers"),
    [(("tandem-tiny", "tiny"), ["decode-0", "prefill-0"]), (("other", "second"), ["decode-m2-0", "prefill-m2-0"])],
)
def test_a_request_goes_to_workers_of_its_model(
    house: RouterHarness, names: tuple[str, ...], workers: list[str]
) -> None:
    asked(house)
    for name in names:
        body = {"model": name, "prompt": "Hello", "max_tokens": 4}
        answer = httpx.post(f"{house.url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert asked(house) == workers
        with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
            request = i.GenerateRequest(model=name, text="Hello", sampling=i.GenerateSampling(max_tokens=4))
            assert list(i_grpc.InferenceStub(channel).Generate(request, timeout=15))[-1].finished
        assert asked(house) == workers


def test_each_model_has_its_tokenizer_and_its_context(house: RouterHarness) -> None:
    def count(name: str | None, **more: Any) -> httpx.Response:
        return httpx.post(f"{house.url}/tokenize", json=({"model": name} if name else {}) | more)

    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    texts = [
        httpx.post(
            f"{house.url}/detokenize", json={"model": name, "tokens": count(name, **chat).json()["tokens"]}
        ).json()
        for name in ("tiny", "other")
    ]
    assert texts[1] == {"prompt": "other: Hi"}
    assert texts[0] != texts[1]
    assert count(None, prompt="Hi").status_code == 400
    assert "name one of" in count(None, prompt="Hi").json()["error"]["message"].lower()
    body = {"model": "other", "prompt": [7] * 90, "max_tokens": 7}
    answer = httpx.post(f"{house.url}/v1/completions", json=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert httpx.post(f"{house.url}/v1/completions", json={**body, "model": "tiny"}).status_code == 200


def test_one_model_without_workers_leaves_the_other_alone(tmp_path: Path) -> None:
    with builder(tmp_path) as make:
        house = make(models=(TINY, other_model(tmp_path / "other")), worker_wait_s=0.0)
        house.wait_ready()
        house.kill_worker("decode-m2-0")
        house.wait(lambda: bool(house.router.readiness.missing()))
        ready = httpx.get(f"{house.url}/readyz")
        assert ready.status_code == 200
        assert [line.partition(":")[0] for line in ready.json()["missing"]] == ["other"] * len(ready.json()["missing"])
        for name, status in (("tiny", 200), ("other", 503)):
            body = {"model": name, "prompt": "Hello", "max_tokens": 4}
            assert httpx.post(f"{house.url}/v1/completions", json=body).status_code == status
        house.kill_worker("decode-0")
        house.wait(lambda: not house.router.readiness.is_ready)
        assert httpx.get(f"{house.url}/readyz").status_code == 503
