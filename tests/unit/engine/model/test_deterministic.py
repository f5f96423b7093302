"""Test `--deterministic`: logits in any batch, and tokens in any history."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.clock import MonotonicClock
from tandem.core.errors import ConfigError
from tandem.engine.engine import Engine
from tandem.engine.kv_pool import PoolCopies
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tandem.engine.swapping import Swap
from tandem.kernels import native
from tandem.kernels.deterministic_attention import reference
from tests.unit.engine.bundled import Answers, request, run
from tests.unit.engine.model.driver import Driver, random_tokens, tool

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
def tokens(runner: ModelRunner) -> list[int]:
    found: list[int] = random_tokens(LENGTH, runner.vocab_size)
    return found


@pytest.fixture(scope="module")
def alone(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    from tandem.engine.runner_protocol import SeqSlice, StepBatch

    table = list(range(10))
    return runner.forward(
        StepBatch(tokens, list(range(LENGTH)), [SeqSlice(LENGTH, LENGTH, (table,))], list(range(LENGTH)))
    )


@pytest.mark.drawn(35)
@pytest.mark.parametrize("chunk", [1, 7, 16, 37, 64])
def test_chunking_changes_no_bit(chunk: int, runner: ModelRunner, tokens: list[int], alone: torch.Tensor) -> None:
    assert torch.equal(Driver(runner).chunked("a", tokens, chunk), alone)


def test_neighbours_change_no_bit(runner: ModelRunner, tokens: list[int], alone: torch.Tensor) -> None:
    driver = Driver(runner)
    others = {f"other{n}": random_tokens(3 + 40 * n, runner.vocab_size, n) for n in range(3)}
    got = driver.step({"other0": others["other0"], "a": tokens[:70], "other1": others["other1"]})
    assert torch.equal(got["a"], alone[:70])
    for place in range(70, 76):
        step = {"other0": [5], "a": [tokens[place]], "other1": [9]}
        if place == 72:
            step["other2"] = others["other2"]
        assert torch.equal(driver.step(step)["a"][0], alone[place])
    assert torch.equal(driver.step({"a": tokens[76:], "other2": [1, 2, 3]})["a"], alone[76:])


def test_a_wanted_subset_of_rows_changes_no_bit(runner: ModelRunner, tokens: list[int], alone: torch.Tensor) -> None:
    from tandem.engine.runner_protocol import SeqSlice, StepBatch

    batch = StepBatch(tokens, list(range(LENGTH)), [SeqSlice(LENGTH, LENGTH, (list(range(10)),))], [LENGTH - 1, 4])
    assert torch.equal(runner.forward(batch), alone[[LENGTH - 1, 4]])


def test_two_threads_change_no_bit(runner: ModelRunner, tokens: list[int], alone: torch.Tensor) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(Driver(runner).chunked("a", tokens, 64), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "gemma3", "qwen3_moe", "gpt_oss"])
def test_it_agrees_with_the_plain_path(name: str, reference: Any, model_folder: Any) -> None:
    want = reference(name)
    runner = ModelRunner(model_dir=model_folder(name), num_blocks=40, max_model_len=512, is_deterministic=True)
    got = Driver(runner).chunked("a", want.tokens[:300], 128)
    torch.testing.assert_close(got, want.logits[:300], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["bundled", "qwen3", "gemma3"])
def test_bf16_stays_as_near_to_fp32_as_the_plain_path(name: str, model_folder: Any, reference: Any) -> None:
    want, errors = reference(name), []
    for is_deterministic in (True, False):
        options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 40, "max_model_len": 512}
        runner = ModelRunner(model_dir=model_folder(name), is_deterministic=is_deterministic, **options)
        got = Driver(runner).chunked("a", want.tokens[:150], 64)
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
def test_it_computes_in_the_dtype_of_the_checkpoint_where_it_can(stored: str, computed: str, tmp_path: Path) -> None:
    tool.make_random_model(tool.RandomModel(family="llama", dtype=stored), tmp_path)
    assert ModelRunner(model_dir=tmp_path, num_blocks=200, is_deterministic=True).dtype == computed


def test_without_c_code_no_bit_changes_either(model_folder: Any) -> None:
    before = native.enable(False)
    try:
        options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 40, "max_model_len": 128}
        runner = ModelRunner(model_dir=model_folder("llama-biases"), is_deterministic=True, **options)
        tokens = random_tokens(60, runner.vocab_size)
        whole = Driver(runner).chunked("a", tokens, 60)
        for chunk in (1, 7, 16):
            assert torch.equal(Driver(runner).chunked("b", tokens, chunk), whole)
    finally:
        native.enable(before)


MODELS = (
    ("llama-biases", "none"), ("qwen3", "none"), ("gemma3", "none"), ("qwen3", "int8"), ("gemma3", "int4"),
)  # fmt: skip
"""A family, and how its weights are quantised."""
PROMPTS = (30, 47, 75, 30, 30)
"""Tokens of each; all begin alike."""
SAMPLING: dict[str, Any] = {"max_tokens": 40, "logprobs": 10, "temperature": 0.7, "seed": 3}
"""One token is drawn at random, so that a differing bit has a chance to become a differing token."""


def ask(engine: Engine, prompts: dict[int, list[int]]) -> Answers:
    return run(engine, *(request(f"r{number}", prompt, **SAMPLING) for number, prompt in prompts.items()))


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def case(request: pytest.FixtureRequest, model_folder: Any) -> Any:
    """A way to make runners of a family, its prompts, and the answer to each when nothing else was ever asked."""
    family, quantize = request.param

    def make(**options: Any) -> ModelRunner:
        shape: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "num_blocks": 96, **options}
        return ModelRunner(model_dir=model_folder(family), is_deterministic=True, quantize=quantize, **shape)

    vocab = make().vocab_size
    common = random_tokens(20, vocab, 9)
    prompts = {n: [*common, *random_tokens(length - 20, vocab, n)] for n, length in enumerate(PROMPTS)}
    alone: dict[tuple[str, int], list[Any]] = {}
    for number, prompt in prompts.items():
        alone |= ask(Engine(make(), clock=MonotonicClock()), {number: prompt}).scored()
    return make, prompts, alone


@pytest.mark.drawn(2)
def test_it_is_the_same_among_others(case: Any) -> None:
    make, prompts, alone = case
    asked = ask(Engine(make(), clock=MonotonicClock()), prompts)
    assert asked.together > 1
    assert asked.scored() == alone


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("block", "chunk"), [(1, 1), (8, 8), (16, 64)])
def test_it_is_the_same_in_chunks(case: Any, block: int, chunk: int) -> None:
    make, prompts, alone = case
    runner = make(block_tokens=block, num_blocks=1200 // block)
    config = SchedulerConfig(chunk_tokens=chunk, max_step_tokens=chunk + 4)
    assert ask(Engine(runner, config=config, clock=MonotonicClock()), prompts).scored() == alone


def test_it_is_the_same_with_prefix_hits(case: Any) -> None:
    make, prompts, alone = case
    engine = Engine(make(), clock=MonotonicClock())
    ask(engine, {number + 10: prompt for number, prompt in prompts.items()})
    asked = ask(engine, prompts)
    assert asked.cached >= 16 * len(prompts)
    assert asked.scored() == alone


@pytest.mark.parametrize("is_swapped", [False, True])
def test_it_is_the_same_after_preemption(case: Any, is_swapped: bool) -> None:
    make, prompts, alone = case
    runner, swap = make(num_blocks=14), None
    if is_swapped:
        speeds = {"save_bytes_per_s": 1e12, "restore_bytes_per_s": 1e12}
        swap = Swap(PoolCopies(runner.pools), runner.layout, 1 << 30, MonotonicClock(), **speeds)
    asked = ask(Engine(runner, clock=MonotonicClock(), swap=swap), prompts)
    assert asked.preempted
    assert (swap.tokens > 0) if swap is not None else True
    assert asked.scored() == alone


def test_it_is_the_same_on_two_threads(case: Any) -> None:
    make, prompts, alone = case
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert ask(Engine(make(), clock=MonotonicClock()), prompts).scored() == alone
    finally:
        torch.set_num_threads(before)


def test_another_way_to_compute_is_noticed(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison distinguishes orders of additions: here that of attention in smaller tiles, in float32,
    as to round to bfloat16 may hide it."""
    make, prompts, _ = case
    found = [ask(Engine(make(dtype="float32"), clock=MonotonicClock()), prompts).scored()]
    monkeypatch.setattr(reference, "KEY_TILE", reference.KEY_TILE // 8)
    found.append(ask(Engine(make(dtype="float32"), clock=MonotonicClock()), prompts).scored())
    assert found[0] != found[1]
