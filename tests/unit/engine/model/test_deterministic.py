"""`--deterministic`: a token's logits are the same bits alone, in a batch, in chunks of any size, after any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.engine.runner import ModelRunner
from tandem.kernels import native

LENGTH = 150


@pytest.fixture(
    scope="module", params=[
        *(("float32", *each) for each in (
            ("bundled", "auto"), ("mistral", "auto"), ("qwen3", "auto"), ("gemma2", "auto"), ("gemma3", "auto"),
            ("mixtral", "auto"), ("qwen3_moe", "auto"), ("gpt_oss", "auto"), ("deepseek_v3", "auto"),
            ("qwen3", "bfloat16"), ("bundled", "float16"),
        )),
        *(("bfloat16", *each) for each in (
            ("bundled", "auto"), ("llama-biases", "auto"), ("mistral", "auto"), ("qwen3", "auto"), ("gemma2", "auto"),
            ("gemma3", "auto"), ("mixtral", "auto"), ("gpt_oss", "auto"), ("deepseek_v3", "auto"), ("qwen3", "float32"),
        )),
    ],
    ids="-".join,
)  # fmt: skip
def runner(request: pytest.FixtureRequest, model_folder: Any) -> ModelRunner:
    """Rounding on the way into the pool is a matter of one number: KV of another dtype keeps the promise."""
    dtype, name, kv_dtype = request.param
    return ModelRunner(
        model_dir=model_folder(name), dtype=dtype, kv_dtype=kv_dtype, num_blocks=120, max_model_len=512,
        is_deterministic=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokens(runner: ModelRunner, tokens_of: Any) -> list[int]:
    found: list[int] = tokens_of(LENGTH, runner.vocab_size)
    return found


@pytest.fixture(scope="module")
def alone(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    from tandem.engine.step_batch import SeqSlice, StepBatch

    table = list(range(10))
    return runner.forward(
        StepBatch(tokens, list(range(LENGTH)), [SeqSlice(LENGTH, LENGTH, (table,))], list(range(LENGTH)))
    )


@pytest.mark.drawn(35)
@pytest.mark.parametrize("chunk", [1, 7, 16, 37, 64])
def test_chunking_changes_no_bit(
    chunk: int, runner: ModelRunner, tokens: list[int], alone: torch.Tensor, driver_of: Any
) -> None:
    assert torch.equal(driver_of(runner).chunked("a", tokens, chunk), alone)


def test_neighbours_change_no_bit(
    runner: ModelRunner, tokens: list[int], alone: torch.Tensor, driver_of: Any, tokens_of: Any
) -> None:
    driver = driver_of(runner)
    others = {f"other{n}": tokens_of(3 + 40 * n, runner.vocab_size, n) for n in range(3)}
    got = driver.step({"other0": others["other0"], "a": tokens[:70], "other1": others["other1"]})
    assert torch.equal(got["a"], alone[:70])
    for place in range(70, 76):
        step = {"other0": [5], "a": [tokens[place]], "other1": [9]}
        if place == 72:
            step["other2"] = others["other2"]
        assert torch.equal(driver.step(step)["a"][0], alone[place])
    assert torch.equal(driver.step({"a": tokens[76:], "other2": [1, 2, 3]})["a"], alone[76:])


def test_a_wanted_subset_of_rows_changes_no_bit(runner: ModelRunner, tokens: list[int], alone: torch.Tensor) -> None:
    from tandem.engine.step_batch import SeqSlice, StepBatch

    batch = StepBatch(tokens, list(range(LENGTH)), [SeqSlice(LENGTH, LENGTH, (list(range(10)),))], [LENGTH - 1, 4])
    assert torch.equal(runner.forward(batch), alone[[LENGTH - 1, 4]])


def test_two_threads_change_no_bit(runner: ModelRunner, tokens: list[int], alone: torch.Tensor, driver_of: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(driver_of(runner).chunked("a", tokens, 64), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gemma3", "qwen3_moe", "gpt_oss"])
def test_it_agrees_with_the_plain_path(name: str, reference: Any, model_folder: Any, driver_of: Any) -> None:
    want = reference(name)
    runner = ModelRunner(model_dir=model_folder(name), num_blocks=40, max_model_len=512, is_deterministic=True)
    got = driver_of(runner).chunked("a", want.tokens[:300], 128)
    torch.testing.assert_close(got, want.logits[:300], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["bundled", "qwen3", "gemma3"])
def test_bf16_stays_as_near_to_fp32_as_the_plain_path(
    name: str, model_folder: Any, reference: Any, driver_of: Any
) -> None:
    want, errors = reference(name), []
    for is_deterministic in (True, False):
        options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 40, "max_model_len": 512}
        runner = ModelRunner(model_dir=model_folder(name), is_deterministic=is_deterministic, **options)
        got = driver_of(runner).chunked("a", want.tokens[:150], 64)
        errors.append(float((got - want.logits[:150]).norm() / want.logits[:150].norm()))
    assert 0 < errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"dtype": "float16"}, "deterministic cannot run in float16"), ({"block_tokens": 24}, "must divide 128")],
)
def test_where_it_cannot_hold_it_is_refused(options: dict[str, Any], complaint: str, model_folder: Any) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ModelRunner(model_dir=model_folder("llama"), num_blocks=200, is_deterministic=True, **options)


@pytest.mark.parametrize(("stored", "computed"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_it_computes_in_the_dtype_of_the_checkpoint_where_it_can(
    stored: str, computed: str, random_model_tool: Any, tmp_path: Path
) -> None:
    random_model_tool.make_random_model(random_model_tool.RandomModel(family="llama", dtype=stored), tmp_path)
    assert ModelRunner(model_dir=tmp_path, num_blocks=200, is_deterministic=True).dtype == computed


def test_without_c_code_no_bit_changes_either(model_folder: Any, driver_of: Any, tokens_of: Any) -> None:
    before = native.enable(False)
    try:
        options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 40, "max_model_len": 128}
        runner = ModelRunner(model_dir=model_folder("llama-biases"), is_deterministic=True, **options)
        tokens = tokens_of(60, runner.vocab_size)
        whole = driver_of(runner).chunked("a", tokens, 60)
        for chunk in (1, 7, 16):
            assert torch.equal(driver_of(runner).chunked("b", tokens, chunk), whole)
    finally:
        native.enable(before)
