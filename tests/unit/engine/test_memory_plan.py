"""The uses of a rank's memory, by arithmetic, and the message where there is too little of it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import StartupError
from tandem.engine import memory_plan
from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.memory_plan import AutomaticKV, MemoryPlan, StepBounds, free_host_bytes, plan_memory
from tandem.engine.model_config import read_model_config
from tandem.engine.pool_plan import kv_layout
from tandem.engine.rope_config import RopeConfig
from tandem.kernels import extend_attention
from tandem.kernels.extend_attention import flash
from tests.unit.engine.bundled import MODEL

MIB = 1 << 20
PLAN = MemoryPlan(weights=2000 * MIB, kv=4000 * MIB, activations=300 * MIB, sampler=100 * MIB)
LLAMA_3_8B = dataclasses.replace(
    read_model_config(MODEL), vocab_size=128_256, hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8,
    head_dim=128, is_tied=False,
)  # fmt: skip


def plan_of(
    *, tp: int = 1, tokens: int = 512, sequences: int = 64, is_cpu: bool = False, kv_dtype: str = "bfloat16",
    dtype: str = "bfloat16", **changes: Any,
) -> MemoryPlan:  # fmt: skip
    layout = kv_layout(LLAMA_3_8B, dtype=kv_dtype, block_tokens=16, tp=tp)
    return plan_memory(
        dataclasses.replace(LLAMA_3_8B, **changes), layout, (1000,), dtype=dtype, weight_bytes=7,
        max_positions=8192, bounds=StepBounds(tokens=tokens, sequences=sequences), is_cpu=is_cpu,
    )  # fmt: skip


def test_kv_and_weights_are_exact_and_add_up_with_the_rest() -> None:
    plan = plan_of()
    assert (plan.weights, plan.kv) == (7, 1000 * 32 * 2 * 8 * 16 * 128 * 2)
    assert plan.total == plan.weights + plan.kv + plan.activations + plan.sampler == plan.fields()["total_bytes"]
    assert plan_of(tp=2).kv * 2 == plan.kv


def test_a_step_of_twice_the_tokens_needs_twice_the_room_for_them() -> None:
    one, two, four = (plan_of(tokens=tokens).activations for tokens in (512, 1024, 2048))
    assert four - two == 2 * (two - one) > 0
    # Gate, up and their product, in bfloat16, are the widest moment of a token.
    assert two - one > 512 * 3 * 14_336 * 2


def test_on_a_cpu_the_longest_context_is_gathered() -> None:
    """In bfloat16 for any window, by the C code; else where a layer sees all of it."""
    plain = plan_of().activations
    more: dict[str, Any] = {"is_cpu": True, "window": 4096}
    keys_and_values, seen = 2 * 8 * 128 * 2, 512 * (1 + 2)
    assert plan_of(is_cpu=True).activations - plain == 8192 * (keys_and_values + seen)
    # Where torch has to do it: of 8 query heads at a time, 32 in all, three times.
    of_torch = plan_of(is_cpu=True, kv_dtype="float32").activations - plain
    assert of_torch == 8192 * ((3 + 3) * keys_and_values + seen)
    few = plan_of(is_cpu=True, kv_dtype="float32", heads=8).activations - plan_of(heads=8).activations
    assert few == 8192 * ((3 + 1) * keys_and_values + seen), "in one part"
    assert plan_of(**more, windowed_layers=frozenset(range(1, 32))).activations > plain
    whole = plan_of(is_cpu=True).activations
    assert plan_of(**more, windowed_layers=frozenset(range(32))).activations == whole
    assert plan_of(is_cpu=True, attention_softcap=50.0).activations == whole
    plain = plan_of(dtype="float32").activations
    assert plan_of(**more, dtype="float32", windowed_layers=frozenset(range(32))).activations == plain
    assert plan_of(is_cpu=True, dtype="float32", attention_softcap=50.0).activations == plain


def test_what_attention_reorders_is_bounded_as_the_kernel_bounds_it() -> None:
    assert memory_plan.REORDERED_BYTES == flash.REORDERED_BYTES
    assert memory_plan._CODE_WIDTHS == extend_attention.WIDTHS


def test_norms_of_heads_count_where_attention_is_the_widest_moment() -> None:
    narrow: dict[str, Any] = {"intermediate": 4096}
    normed = plan_of(**narrow, has_qk_norm=True).activations
    assert normed - plan_of(**narrow).activations == 512 * 2 * 4 * 128 * (32 + 8)


def test_experts_count_by_what_a_token_meets_and_what_one_of_them_may_have_to_do() -> None:
    """Of Mixtral's shape: two rows of 4096, and gate, up, their product and the answer of the busiest expert."""
    experts = ExpertsConfig(count=8, per_token=2, intermediate=14_336, layers=frozenset(range(32)))
    dense, mixture = plan_of(), plan_of(experts=experts)
    assert mixture.activations - dense.activations == 512 * (2 * (4096 * 2 + 48) + 8 * 10)
    halves = plan_of(tp=2, experts=experts)
    assert mixture.activations - halves.activations == 512 * 3 * 14_336 // 2 * 2
    few = dataclasses.replace(experts, intermediate=256, layers=frozenset({0}))
    assert plan_of(experts=few) == dense, "other layers are wider"
    assert plan_of(experts=few, intermediate=512).activations < dense.activations


def test_on_a_gpu_activations_of_all_experts_are_in_memory_at_once() -> None:
    two = ExpertsConfig(count=8, per_token=2, intermediate=14_336, layers=frozenset(range(32)))
    eight = dataclasses.replace(two, per_token=8)
    rows = 512 * 6 * (4096 * 2 + 48)
    on_cpu = plan_of(experts=eight, is_cpu=True).activations - plan_of(experts=two, is_cpu=True).activations
    assert on_cpu == rows, "one expert after another"
    on_gpu = plan_of(experts=eight).activations - plan_of(experts=two).activations
    assert on_gpu == rows + 512 * 2 * (8 - 3) * 14_336


def test_each_rotation_has_tables() -> None:
    two = plan_of(local_rope=RopeConfig()).activations
    assert two - plan_of().activations == 2 * 2 * 128 * (8192 + 512)


def test_logits_of_all_that_sample_are_in_it() -> None:
    assert plan_of(sequences=256).sampler > 256 * 128_256 * (2 + 4)
    assert plan_of(sequences=256).sampler > plan_of(sequences=256, is_cpu=True).sampler > plan_of(is_cpu=True).sampler


def test_graphs_count_and_are_named_where_there_are_some() -> None:
    more = dataclasses.replace(PLAN, graphs=50 * MIB)
    assert more.total == PLAN.total + 50 * MIB == more.fields()["total_bytes"]
    assert "CUDA graphs 50MiB" in more.words()
    assert "CUDA graphs" not in PLAN.words()
    with pytest.raises(StartupError, match="50MiB for CUDA graphs"):
        more.check(5000 * MIB)


def test_what_is_said_to_do_is_enough() -> None:
    with pytest.raises(
        StartupError, match=r"needs 6400MiB of memory and 5000MiB are free.*2000MiB for weights"
    ) as said:
        PLAN.check(5000 * MIB)
    (advised,) = re.findall(r"[Gg]ive --kv-memory (\d+)MiB or less", str(said.value))
    dataclasses.replace(PLAN, kv=int(advised) * MIB).check(5000 * MIB)
    with pytest.raises(StartupError):
        dataclasses.replace(PLAN, kv=(int(advised) + 1) * MIB).check(5000 * MIB)


def test_ranks_of_a_cpu_share_its_memory() -> None:
    PLAN.check(6400 * MIB)
    with pytest.raises(StartupError, match="each of its 2 ranks") as said:
        PLAN.check(6400 * MIB, ranks=2)
    (advised,) = re.findall(r"[Gg]ive --kv-memory (\d+)MiB or less", str(said.value))
    dataclasses.replace(PLAN, kv=int(advised) * MIB).check(6400 * MIB, ranks=2)


def test_less_kv_is_no_advice_where_the_rest_does_not_fit() -> None:
    with pytest.raises(StartupError, match="smaller model") as said:
        PLAN.check(2000 * MIB)
    assert "--kv-memory" not in str(said.value)


def test_the_container_bounds_what_is_free(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       32000 kB\nMemAvailable:   20000 kB\n")
    assert free_host_bytes(info, tmp_path) == 20000 << 10
    (tmp_path / "memory.max").write_text("8000000\n")
    (tmp_path / "memory.current").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 3000000\nactive_file 500000\ninactive_file 1500000\n")
    assert free_host_bytes(info, tmp_path) == 8000000 - 5000000 + 2000000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(info, tmp_path) == 20000 << 10
    assert free_host_bytes(tmp_path / "nothing", tmp_path) is None


def test_memory_that_a_container_has_left_by_version_1_of_control_groups(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.usage_in_bytes").write_text("5000000\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 1500000\ntotal_active_file 500000\n")
    (folder / "memory.limit_in_bytes").write_text("8000000\n")
    assert free_host_bytes(tmp_path / "nothing", tmp_path) == 8000000 - 5000000 + 2000000


ONE = dataclasses.replace(PLAN, kv=500 * MIB)
"""2,400 MiB beside KV of one context."""


@pytest.mark.parametrize(
    ("automatic", "free", "ranks", "expected"),
    [
        (AutomaticKV(), 12_400, 1, 5000),
        (AutomaticKV(share=0.9), 12_400, 1, 9000),
        (AutomaticKV(neighbours=2), 12_400, 1, 1900),
        (AutomaticKV(), 12_400, 2, 1900),
        (AutomaticKV(memory_bytes=6400 * MIB), 12_400, 1, 2000),
        (AutomaticKV(memory_bytes=6400 * MIB, neighbours=4), 12_400, 1, 2000),
        (AutomaticKV(memory_bytes=64_000 * MIB), 12_400, 1, 5000),
        (AutomaticKV(), 3000, 1, 500),
        (AutomaticKV(), 2900, 1, 500),
        (AutomaticKV(), 1_000_000, 1, 8 * 500),
    ],
    ids=["half", "share", "neighbours", "ranks", "given", "given wins", "never more than is free", "one context",
         "just one context", "as many as run"],
)  # fmt: skip
def test_automatic_kv(automatic: AutomaticKV, free: int, ranks: int, expected: int) -> None:
    sequences = 8 if free == 1_000_000 else 64
    found = automatic.kv_bytes(ONE, free * MIB, ranks=ranks, sequences=sequences, max_positions=4096)
    assert found == expected * MIB
    dataclasses.replace(ONE, kv=found).check(free * MIB, ranks)


def test_too_little_for_one_context_says_what_would_fit() -> None:
    with pytest.raises(StartupError) as caught:
        AutomaticKV().kv_bytes(ONE, 2650 * MIB, ranks=1, sequences=64, max_positions=4096)
    assert caught.value.message == (
        "no KV for one sequence of 4096 tokens: it takes 500MiB: of 2650MiB that this worker may take, 2400MiB go to "
        "weights and steps. Give --max-model-len 2048 or less, or start fewer workers, "
        "or use a machine with more memory or a smaller model."
    )
    with pytest.raises(StartupError, match=r"steps for each of 2 ranks\. Start fewer workers"):
        AutomaticKV().kv_bytes(ONE, 2650 * MIB, ranks=2, sequences=64, max_positions=4096)
