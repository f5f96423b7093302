"""The whole engine over a real model: greedy tokens of transformers under any schedule, prefix hits and preemption."""

from typing import Any

import pytest
import torch

from proof.exactness.reference import CLEAR, RouterGap
from tandem.core.clock import MonotonicClock
from tandem.engine.engine import Engine
from tandem.engine.model_config import read_model_config
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tests.unit.engine.bundled import ANSWER, Answers, request, run
from tests.unit.engine.model.driver import random_tokens

MODELS = (
    "bundled", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss",
    "deepseek_v3",
)  # fmt: skip
LENGTHS = (5, 16, 47, 90)


def greedy_of_transformers(folder: Any, prompt: list[int]) -> list[int]:
    """The answer, once it is sure that no two candidates, tokens or experts, are so close that rounding could swap
    them."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, routers = list(prompt), RouterGap(model)
    with torch.no_grad():
        cache = DynamicCache()
        for _ in range(ANSWER):
            unseen = torch.tensor([tokens[cache.get_seq_length() :]])
            output = model(unseen, None, None, cache)  # by place: its name changes in transformers 5.24
            best = output.logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-4, "choose another prompt"
            tokens.append(int(best.indices[0]))
    assert routers.smallest > CLEAR, "choose another prompt"
    return tokens[len(prompt) :]


def ask(engine: Engine, prompts: dict[str, list[int]], choices: int = 1) -> Answers:
    return run(engine, *(request(key, prompt, n=choices) for key, prompt in prompts.items()))


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, model_folder: Any) -> tuple[Any, dict[str, list[int]], Any]:
    """A model's folder, prompts of which later ones begin like the first, and the answers of transformers."""
    folder = model_folder(request.param)
    everything = random_tokens(max(LENGTHS), 512, seed=11)
    prompts = {f"r{length}": everything[:length] for length in LENGTHS}
    answers = {key: greedy_of_transformers(folder, prompt) for key, prompt in prompts.items()}
    return folder, prompts, answers


def _has_windows_alone(folder: Any) -> bool:
    config = read_model_config(folder)
    return len(config.windowed_layers) == config.layers


@pytest.mark.drawn(22)
@pytest.mark.parametrize(
    ("blocks", "chunk", "is_deterministic"), [(64, 512, False), (64, 16, False), (9, 32, False), (9, 32, True)]
)
def test_greedy_tokens_are_those_of_transformers(case: Any, blocks: int, chunk: int, is_deterministic: bool) -> None:
    folder, prompts, answers = case
    is_tight = blocks == 9
    if is_tight and _has_windows_alone(folder):
        blocks = 8  # windows give blocks back
    runner = ModelRunner(
        model_dir=folder, dtype="float32", num_blocks=blocks, max_model_len=128, is_deterministic=is_deterministic
    )
    engine = Engine(
        runner, config=SchedulerConfig(max_step_tokens=chunk + 8, chunk_tokens=chunk), clock=MonotonicClock()
    )
    found = ask(engine, prompts)
    assert {key: found.tokens(key) for key in prompts} == answers
    assert bool(found.preempted) == is_tight
    assert ask(engine, {"again": prompts["r90"]}).tokens("again") == answers["r90"]
    assert engine.cached_tokens("again") >= 64


def test_choices_share_a_prompt_and_part_ways_by_copy(case: Any) -> None:
    folder, prompts, answers = case
    runner = ModelRunner(model_dir=folder, dtype="float32", num_blocks=64, max_model_len=128)
    found = ask(Engine(runner, clock=MonotonicClock()), {"a": prompts["r47"]}, choices=3)
    assert [found.tokens("a", choice) for choice in range(3)] == [answers["r47"]] * 3
