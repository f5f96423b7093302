"""A TP that does not fit the model is refused before anything starts, with the reason and the sizes that fit."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ModelError
from tandem.engine.model_config import ModelConfig, check_tp, fitting_tp, read_model_config, tp_refusal
from tandem.engine.parallel import SingleRank
from tandem.engine.runner import ModelRunner

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def config_of(raw_config: dict[str, Any], write_config: Callable[[dict[str, Any]], Path]) -> Callable[..., ModelConfig]:
    def make(heads: int, kv_heads: int, intermediate: int) -> ModelConfig:
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": intermediate}
        return read_model_config(write_config(raw_config | shape | {"head_dim": 8}))

    return make


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "fits"),
    [
        (8, 4, 96, (1, 2, 4, 8)),
        (8, 8, 96, (1, 2, 4, 8)),
        (8, 1, 96, (1, 2, 4, 8)),
        (12, 2, 96, (1, 2, 4)),
        (9, 3, 96, (1, 3)),
        (24, 6, 96, (1, 2, 3)),
        (24, 12, 96, (1, 2, 3, 4)),
        (8, 4, 100, (1, 2, 4)),
        (8, 4, 99, (1,)),
        (15, 5, 100, (1,)),
    ],
)
def test_the_sizes_that_fit(heads: int, kv_heads: int, intermediate: int, fits: Any, config_of: Any) -> None:
    config = config_of(heads, kv_heads, intermediate)
    assert fitting_tp(config) == fits
    for tp in fits:
        check_tp(config, tp)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, (1, 2, 4)),
        ({"moe_intermediate_size": 24}, (1, 2, 4, 8)),
        ({"moe_intermediate_size": 24, "intermediate_size": 99}, (1, 2, 4, 8)),
        ({"moe_intermediate_size": 24, "intermediate_size": 99, "mlp_only_layers": [0]}, (1,)),
    ],
)
def test_the_features_of_each_expert_must_split_and_those_of_mlps_where_there_are_any(
    changes: dict[str, Any], fits: tuple[int, ...], raw_config: dict[str, Any], write_config: Any
) -> None:
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 20, "head_dim": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 96}
    config = read_model_config(write_config(raw_config | experts | heads | changes))
    assert fitting_tp(config) == fits
    if not changes:
        with pytest.raises(ModelError, match="its experts' 20 features cannot be split evenly over 8 ranks"):
            check_tp(config, 8)


@pytest.mark.parametrize(
    ("shape", "tp", "complaint"),
    [
        ((9, 3, 96), 2, r"--tp 2 does not fit the model \(LlamaForCausalLM\): its 9 query heads .* Use --tp 1, 3\.$"),
        ((24, 6, 96), 4, "its 6 KV heads can neither be split nor repeated evenly over 4 ranks. Use --tp 1, 2"),
        ((8, 4, 100), 8, "its 100 intermediate features .* Use --tp 1, 2, 4"),
        ((8, 4, 96), 3, "--tp 3 does not fit .*: its 8 query heads .* Use --tp 1, 2, 4, 8"),
        ((10, 5, 100), 5, "--tp 5 does not fit .*: a worker has 1, 2, 3, 4 or 8 ranks. Use --tp 1"),
        ((8, 4, 96), 0, "a worker has 1, 2, 3, 4 or 8 ranks"),
    ],
)
def test_a_refusal_says_why_and_what_fits(shape: tuple[int, int, int], tp: int, complaint: str, config_of: Any) -> None:
    assert tp_refusal(config_of(*shape), tp)
    with pytest.raises(ModelError, match=complaint):
        check_tp(config_of(*shape), tp)


def test_the_runner_asks_before_it_loads(model_folder: Any) -> None:
    class Sixteenth(SingleRank):
        size = 16

        def __init__(self) -> None:
            self.rank = 0

    with pytest.raises(ModelError, match="--tp 16 does not fit"):
        ModelRunner(model_dir=model_folder("llama"), num_blocks=8, max_model_len=64, group=Sixteenth())


@pytest.mark.slow
def test_asking_needs_no_torch() -> None:
    code = "import sys, tandem.engine.model_config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
