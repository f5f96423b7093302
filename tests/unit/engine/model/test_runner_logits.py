"""The runner against transformers: the same logits and the same KV bytes, for any batch and chunking."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.errors import ModelError
from tandem.engine.models import decoder
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.kernels.fused_layer import DenseRow, LayerParts, fuse
from tests.unit.engine.model.driver import Driver, compute_reference, random_tokens, tool

MODELS = ("bundled", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss")
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")
TOLERANCE = 1e-4


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.drawn(30)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 255, 256, 600])
def test_a_prompt_has_the_logits_of_transformers(name: str, length: int, reference: Any, fp32_runner: Any) -> None:
    want = reference(name)
    got = Driver(fp32_runner(name)).step({"a": want.tokens[:length]})["a"]
    assert got.dtype is torch.float32
    assert not got.is_inference()  # the sampler writes over it
    close(got, want.logits[:length])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_chunks_have_the_logits_and_the_kv_of_the_whole(
    name: str, chunk: int, reference: Any, fp32_runner: Any
) -> None:
    want = reference(name)
    driver = Driver(fp32_runner(name))
    close(driver.chunked("a", want.tokens, chunk), want.logits)
    for layer, (k, v) in enumerate(want.kv):
        stored_k, stored_v = driver.stored_kv("a", layer)
        close(stored_k, k)
        close(stored_v, v)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("chunk", [1, 7])
def test_a_window_slides_by_tokens_whatever_the_chunks(name: str, chunk: int, reference: Any, fp32_runner: Any) -> None:
    want, runner = reference(name), fp32_runner(name)
    assert any(runner.config.window_of(layer) == 40 for layer in range(runner.config.layers))
    close(Driver(runner).chunked("a", want.tokens[:150], chunk), want.logits[:150])


@pytest.mark.parametrize("name", MODELS)
def test_decodes_and_chunks_share_a_step(name: str, reference: Any, fp32_runner: Any) -> None:
    want = reference(name)
    tokens, driver = want.tokens, Driver(fp32_runner(name))
    starts = {"a": 15, "b": 130, "c": 64}
    first = driver.step({key: tokens[:end] for key, end in starts.items()})
    for key, end in starts.items():
        close(first[key], want.logits[:end])
    for turn in range(3):
        work = {key: tokens[end + turn : end + turn + 1] for key, end in starts.items()}
        work["late"] = tokens[turn * 37 : (turn + 1) * 37]
        got = driver.step(work)
        for key, end in starts.items():
            close(got[key], want.logits[end + turn : end + turn + 1])
        close(got["late"], want.logits[turn * 37 : (turn + 1) * 37])


def test_a_chunk_of_one_token_may_stand_among_the_decodes_or_behind_chunks(reference: Any, fp32_runner: Any) -> None:
    want, runner = reference("llama"), fp32_runner("llama")
    table = Driver(runner)
    table.step({"a": want.tokens[:20]})
    other = list(range(100, 110))
    blocks = [block for block in range(runner.num_blocks[0]) if block not in table.tables["a"]][:1]
    sequences = [SeqSlice(10, 10, (blocks,)), SeqSlice(1, 21, (table.tables["a"],))]
    batch = StepBatch(other + want.tokens[20:21], [*range(10), 20], sequences, [10])
    close(runner.forward(batch), want.logits[20:21])


def test_only_the_wanted_rows_are_returned_in_the_order_asked(reference: Any, fp32_runner: Any) -> None:
    want, runner = reference("qwen3"), fp32_runner("qwen3")
    blocks = list(range(3))
    for rows in ([39], [7, 3, 39], []):
        batch = StepBatch(want.tokens[:40], list(range(40)), [SeqSlice(40, 40, (blocks,))], rows)
        got = runner.forward(batch)
        assert got.shape == (len(rows), runner.vocab_size)
        close(got, want.logits[rows])
    follow = StepBatch(want.tokens[40:41], [40], [SeqSlice(1, 41, (blocks,))], [0])
    close(runner.forward(follow), want.logits[40:41])


def test_layers_are_reported_once_their_kv_is_in_the_pool(reference: Any, fp32_runner: Any) -> None:
    want, runner = reference("bundled"), fp32_runner("bundled")
    driver = Driver(runner)
    for view in runner.pools.layer_views:
        view.zero_()
    seen: list[tuple[int, int]] = []

    def on_layers(first: int, last: int) -> None:
        seen.append((first, last))
        for layer in range(runner.config.layers):
            k, _ = driver.stored_kv("a", layer)
            assert bool(k.any()) == (layer < last)

    driver.stored["a"] = 0
    driver.step({"a": want.tokens[:20]}, on_layers=on_layers)
    assert seen == [(0, 2), (2, 4), (4, 5)]


def test_a_copied_block_serves_in_place_of_its_source(reference: Any, fp32_runner: Any) -> None:
    want, runner = reference("qwen2"), fp32_runner("qwen2")
    driver = Driver(runner)
    driver.step({"a": want.tokens[:40]})
    source = driver.tables["a"][2]
    copy = next(block for block in range(runner.num_blocks[0]) if block not in driver.tables["a"])
    runner.copy_blocks(0, [(source, copy)])
    runner.copy_blocks(0, [])
    runner.pools.tensors[0][source] = 0
    table = [*driver.tables["a"][:2], copy]
    close(runner.forward(StepBatch(want.tokens[40:41], [40], [SeqSlice(1, 41, (table,))], [0])), want.logits[40:41])


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"is_deterministic": True}], ids=str)
def test_a_chunk_may_want_no_logits(options: dict[str, Any], model_folder: Any) -> None:
    runner = ModelRunner(model_dir=model_folder("qwen2"), num_blocks=4, max_model_len=64, **options)
    assert runner.forward(StepBatch([1, 2, 3], [0, 1, 2], [SeqSlice(3, 3, ([3],))])).shape == (0, 512)


@pytest.mark.parametrize("name", ["bundled", "qwen3", "gemma2", "gemma3"])
def test_bf16_stays_near_transformers_in_bf16(name: str, model_folder: Any) -> None:
    runner = ModelRunner(model_dir=model_folder(name), dtype="bfloat16", num_blocks=40, max_model_len=256)
    tokens = random_tokens(200, runner.vocab_size)
    want = compute_reference(model_folder(name), tokens, torch.bfloat16)
    got = Driver(runner).chunked("a", tokens, 64)
    difference = (torch.log_softmax(got, -1) - torch.log_softmax(want.logits, -1)).abs()
    chosen = want.logits.argmax(-1, keepdim=True)
    assert difference.gather(1, chosen).mean() < 0.05


@pytest.mark.parametrize("name", MODELS[1:])
def test_single_rows_of_bf16_stay_near_transformers_in_bf16(
    name: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a width that C code takes; only families with layers that are no more than Llama's may have theirs fused."""
    fused: list[LayerParts] = []

    def watched(parts: LayerParts) -> DenseRow | None:
        fused.append(parts)
        return fuse(parts)

    monkeypatch.setattr(decoder, "fuse", watched)
    shape = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "bfloat16", "seed": 3}
    tool.make_random_model(tool.RandomModel(family=name, **shape), tmp_path)
    runner = ModelRunner(model_dir=tmp_path, num_blocks=40, max_model_len=256, layer_group=1)
    assert len(fused) == (2 if name in ("llama", "mistral", "qwen2") else 0)
    heard: list[tuple[int, int]] = []
    runner.forward(StepBatch([5], [0], [SeqSlice(1, 1, ([3],))]), lambda *layers: heard.append(layers))
    assert heard == ([(0, 2)] if runner.has_joined_layers else [(0, 1), (1, 2)])
    is_fused = bool(fused) and None not in map(fuse, fused)
    assert runner.has_joined_layers == (is_fused and name != "mistral"), "which has a window"
    tokens = random_tokens(100, runner.vocab_size)
    want = compute_reference(tmp_path, tokens, torch.bfloat16)
    got = Driver(runner).chunked("a", tokens, 1)
    difference = (torch.log_softmax(got, -1) - torch.log_softmax(want.logits, -1)).abs()
    chosen = want.logits.argmax(-1, keepdim=True)
    assert difference.gather(1, chosen).mean() < 0.05


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": None}), ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 16}), ("gemma2", {"sliding_window": 100}),
        ("gemma3", {"rope_local_base_freq": 1e6}), ("gemma3", {"sliding_window_pattern": 3}),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma3", {"final_logit_softcapping": 3.0}),
    ],
)  # fmt: skip
def test_each_field_of_gemma_counts(
    name: str, changes: dict[str, Any], model_folder: Any, reference: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The changed model has other logits, and the engine follows."""
    config = json.loads((model_folder(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").write_bytes((model_folder(name) / "model.safetensors").read_bytes())
    tokens = reference(name).tokens[:120]
    want = compute_reference(tmp_path, tokens).logits
    assert (want - reference(name).logits[:120]).abs().max() > 100 * TOLERANCE
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=128)
    close(Driver(runner).chunked("a", tokens, 16), want)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "yarn": {"max_position_embeddings": 64, "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, all of it": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 20000.0, "factor": 8.0, "original_max_position_embeddings": 32,
            "beta_fast": 20, "beta_slow": 2, "mscale": 1.2, "mscale_all_dim": 0.8, "truncate": False,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_scaled_positions_are_those_of_transformers(kind: str, model_folder: Any, tmp_path: Path) -> None:
    config = json.loads((model_folder("llama") / "config.json").read_text())
    del config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config | ROPES[kind]))
    (tmp_path / "model.safetensors").write_bytes((model_folder("llama") / "model.safetensors").read_bytes())
    tokens = random_tokens(200, 512)
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=200)
    close(Driver(runner).chunked("a", tokens, 64), compute_reference(tmp_path, tokens).logits)


def test_dynamic_positions_are_the_plain_ones_as_long_as_the_context_is(
    model_folder: Any, reference: Any, tmp_path: Path
) -> None:
    config = json.loads((model_folder("llama") / "config.json").read_text())
    config |= {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((model_folder("llama") / "model.safetensors").read_bytes())
    want = reference("llama")
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20)
    assert runner.max_model_len == 64
    close(Driver(runner).step({"a": want.tokens[:64]})["a"], want.logits[:64])
    with pytest.raises(ModelError, match="256 or less"):
        ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=257)


def test_a_window_that_is_null_is_none(model_folder: Any, tmp_path: Path) -> None:
    tool.make_random_model(tool.RandomModel(family="mistral", window=0), tmp_path)
    tokens = random_tokens(100, 512)
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=128)
    close(Driver(runner).chunked("a", tokens, 16), compute_reference(tmp_path, tokens).logits)


@pytest.mark.parametrize("layers", [{"max_window_layers": 1}, {"layer_types": ["sliding_attention", "full_attention"]}])
def test_the_windows_of_some_layers(layers: dict[str, Any], model_folder: Any, tmp_path: Path) -> None:
    config = json.loads((model_folder("qwen3") / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 23, **layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((model_folder("qwen3") / "model.safetensors").read_bytes())
    tokens = random_tokens(100, 512)
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=128)
    assert runner.config.windowed_layers == ({1} if "max_window_layers" in layers else {0})
    close(Driver(runner).chunked("a", tokens, 16), compute_reference(tmp_path, tokens).logits)


@pytest.mark.parametrize("variant", ["biases", "head_dim", "tied"])
def test_what_transformers_saves_loads_and_agrees(variant: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    changes: dict[str, Any] = {
        "biases": {"attention_bias": True, "mlp_bias": True},
        "head_dim": {"head_dim": 24, "num_key_value_heads": 1},
        "tied": {"tie_word_embeddings": True},
    }
    torch.manual_seed(5)
    shape: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(shape | changes[variant])))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=128)
    tokens = random_tokens(70, 128)
    close(Driver(runner).step({"a": tokens})["a"], compute_reference(tmp_path, tokens).logits)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Gemma3"])
def test_what_transformers_saves_of_a_family_loads_and_agrees(name: str, is_tied: bool, tmp_path: Path) -> None:
    """transformers writes the new spelling: rope_parameters, for Gemma 3 by layer type, layer_types, dtype."""
    import transformers

    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config"))
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(config(
        vocab_size=128, hidden_size=32, intermediate_size=44, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=20, tie_word_embeddings=is_tied,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    ))  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {"rope_parameters", "dtype"} <= set(saved)
    assert "rope_theta" not in saved
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=128)
    tokens = random_tokens(70, 128)
    close(Driver(runner).chunked("a", tokens, 16), compute_reference(tmp_path, tokens).logits)


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        (StepBatch([1, 2], [0], [SeqSlice(2, 2, ([0],))]), "positions"),
        (StepBatch([], [], []), "at least one token"),
        (StepBatch([1], [40], [SeqSlice(1, 41, ([0],))]), "need 3 blocks"),
        (StepBatch([1], [1024], [SeqSlice(1, 1025, (list(range(65)),))]), "positions must be"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(batch: StepBatch, complaint: str, fp32_runner: Any) -> None:
    with pytest.raises(ValueError, match=complaint):
        fp32_runner("llama").forward(batch)
