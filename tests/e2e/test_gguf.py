"""A cluster serves a GGUF file as it serves the model's safetensors."""

import re
from pathlib import Path
from typing import Any

from tests.integration.worker.pair import MODEL
from tools.gguf_model import write_gguf
from tools.running_cluster import Cluster, running

ALWAYS = ("--prefill", "1", "--decode", "1", "--disaggregation", "always", "--dtype", "float32")


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


def test_a_file_in_float32_needs_no_other_flag(tmp_path: Path) -> None:
    """KV included: as much as there is room for, and the amount is reported."""
    write_gguf(MODEL, tmp_path / "Tiny.F32.gguf")
    with running("--dtype", "float32", "--model", str(tmp_path / "Tiny.F32.gguf"), "--kv-memory", "auto") as cluster:
        assert answer(cluster, "Tiny.F32", prompt="def f(x):")["text"]
        held = re.findall(r"(prefill|decode)-0 +KV of [\d,]+ tokens, ([\d.]+) full contexts", cluster.output)
        assert {role for role, _ in held} == {"prefill", "decode"}
        assert all(float(contexts) >= 1 for _, contexts in held)
