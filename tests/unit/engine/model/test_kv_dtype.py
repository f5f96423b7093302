"""KV in another dtype than the computation: rounded once, where it is stored, and never anywhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.engine.runner import ModelRunner


def runner_of(folder: Any, **options: Any) -> ModelRunner:
    return ModelRunner(model_dir=folder, **({"num_blocks": 40, "max_model_len": 256} | options))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_the_pool_holds_rounded_numbers_and_the_logits_are_near(
    kv_dtype: str, model_folder: Any, tokens_of: Any, driver_of: Any
) -> None:
    folder, tokens = model_folder("qwen3"), tokens_of(150, 512)
    exact = driver_of(runner_of(folder, dtype="float32"))
    small = driver_of(runner_of(folder, dtype="float32", kv_dtype=kv_dtype))
    assert (small.runner.dtype, small.runner.kv_dtype) == ("float32", kv_dtype)
    assert [group.dtype for group in small.runner.layout.groups] == [kv_dtype]
    assert small.runner.pools.tensors[0].dtype is getattr(torch, kv_dtype)
    want, got = exact.step({"a": tokens})["a"], small.step({"a": tokens})["a"]
    # The first layer's keys and values know nothing of the pool: they are the exact ones, rounded once.
    for one, other in zip(small.stored_kv("a", 0), exact.stored_kv("a", 0), strict=True):
        assert torch.equal(one, other.to(one.dtype))
    difference = (torch.log_softmax(got, -1) - torch.log_softmax(want, -1)).abs()
    assert 0 < difference.mean() < 0.02


def test_chunks_and_decodes_read_what_a_whole_prompt_reads(model_folder: Any, tokens_of: Any, driver_of: Any) -> None:
    """New tokens too attend to the stored numbers: how a prompt was cut changes nothing but rounding in fp32."""
    tokens = tokens_of(150, 512)
    driver = driver_of(runner_of(model_folder("qwen2"), dtype="float32", kv_dtype="bfloat16"))
    whole = driver.step({"a": tokens})["a"]
    chunked = torch.cat([driver.chunked("b", tokens[:140], 33), *(driver.step({"b": [t]})["b"] for t in tokens[140:])])
    # A number on the edge between two bf16 values may fall to the other side: hence no tighter bound.
    torch.testing.assert_close(chunked, whole, atol=0.02, rtol=0)


def test_wider_kv_than_the_computation(model_folder: Any, tokens_of: Any, driver_of: Any) -> None:
    """fp32 KV of a bf16 model holds bf16 numbers: the same logits, bit for bit."""
    tokens = tokens_of(100, 512)
    plain, wide = (
        driver_of(runner_of(model_folder("llama"), dtype="bfloat16", kv_dtype=name)) for name in ("auto", "float32")
    )
    assert torch.equal(plain.step({"a": tokens})["a"], wide.step({"a": tokens})["a"])
    assert torch.equal(plain.step({"a": [5]})["a"], wide.step({"a": [5]})["a"])
    assert torch.equal(plain.stored_kv("a", 1)[0].float(), wide.stored_kv("a", 1)[0])


def test_half_the_bytes_buy_twice_the_blocks(model_folder: Any) -> None:
    sizes = [
        runner_of(model_folder("llama"), dtype="float32", kv_dtype=name, kv_bytes=1 << 20, num_blocks=None).num_blocks
        for name in ("auto", "float16")
    ]
    assert sizes[1] == (2 * sizes[0][0],)
