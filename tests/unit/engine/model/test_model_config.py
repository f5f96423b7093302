"""config.json in both spellings gives one ModelConfig; what is not supported is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ModelError
from tandem.engine.families import ANSWER_FIELDS, FAMILIES
from tandem.engine.model_config import read_model_config
from tandem.engine.models.rope import inverse_frequencies
from tandem.engine.rope_config import RopeConfig


def test_old_and_new_spelling_read_the_same(raw_config: dict[str, Any], write_config: Any) -> None:
    old = read_model_config(write_config(raw_config))
    new = {key: value for key, value in raw_config.items() if key not in ("rope_theta", "torch_dtype")}
    new |= {"dtype": "float32", "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "head_dim": 8}
    assert read_model_config(write_config(new)) == old
    assert (old.rope, old.head_dim, old.dtype) == (RopeConfig(theta=5000.0), 8, "float32")


def test_the_bundled_model(model_folder: Any) -> None:
    config = read_model_config(model_folder("bundled"))
    assert (config.layers, config.hidden, config.is_tied, config.dtype) == (5, 256, True, "bfloat16")
    assert config.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("family", "biases", "has_qk_norm"),
    [
        ("llama", (False, False), False),
        ("mistral", (False, False), False),
        ("qwen2", (True, False), False),
        ("qwen3", (False, False), True),
        ("gemma2", (False, False), False),
        ("gemma3", (False, False), True),
    ],
)
def test_families_differ_where_they_should(
    family: str, biases: tuple[bool, bool], has_qk_norm: bool, model_folder: Any
) -> None:
    config = read_model_config(model_folder(family))
    assert ((config.has_qkv_bias, config.has_o_bias), config.has_qk_norm) == (biases, has_qk_norm)


@pytest.mark.parametrize(
    ("generation", "ids"),
    [
        (None, (1,)),
        ({"eos_token_id": 7}, (7, 1)),
        ({"eos_token_id": [9, 1, 9]}, (9, 1)),
        ({"eos_token_id": [9, 1_000_000]}, (9, 1)),  # beyond the vocabulary
        ({"temperature": 0.5}, (1,)),
    ],
)
def test_eos_ids_come_from_both_files(
    generation: dict[str, Any] | None, ids: tuple[int, ...], raw_config: dict[str, Any], write_config: Any
) -> None:
    folder = write_config(raw_config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_model_config(folder).eos_token_ids == ids


def test_a_window_that_is_switched_off_is_no_window(raw_config: dict[str, Any], write_config: Any) -> None:
    changes = {"use_sliding_window": False, "sliding_window": 64, "layer_types": ["full_attention"] * 2}
    assert read_model_config(write_config(raw_config | changes)).layers == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "unsupported architecture MambaForCausalLM.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures is missing: .*LlamaForCausalLM"),
        ({"architectures": []}, "architectures is missing"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM': .*in a list"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer type sliding_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer type chunked_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* a list of 2 kinds"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type longrope is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "speed": 3}}, "rope parameter speed is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"factor": 8.0}}, "have factor and no rope_type.*Add rope_type"),
        ({"rope_scaling": {"rope_type": None, "type": None, "factor": 8.0}}, "have factor and no rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "beta_fast": 32.0}}, "have beta_fast and no rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantized weights"),
        ({"quantization_config": {"quant_method": ["awq"]}}, "quantized weights"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": 2.5}, "whole number"),
        ({"vocab_size": -4}, "vocab_size is -4"),
        ({"num_key_value_heads": 3}, "4 query heads over 3 KV heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_what_cannot_be_served_is_named(
    changes: dict[str, Any], complaint: str, raw_config: dict[str, Any], write_config: Any
) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        read_model_config(write_config(raw_config | changes))
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("name", sorted(ANSWER_FIELDS))
def test_a_field_that_changes_answers_is_computed_or_named(
    architecture: str, name: str, raw_config: dict[str, Any], write_config: Any
) -> None:
    changes = {
        "architectures": [architecture],
        "head_dim": 8,
        name: ANSWER_FIELDS[name][0] if ANSWER_FIELDS[name] else None,
    }
    if FAMILIES[architecture].has_latent:
        changes = {"num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2} | changes
    assert read_model_config(write_config(raw_config | changes)).architecture == architecture
    if name not in FAMILIES[architecture].reads:
        with pytest.raises(ModelError, match=f"{name} 7.5 is not supported"):
            read_model_config(write_config(raw_config | changes | {name: 7.5}))


WINDOW = {"sliding_window": 24}
ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", WINDOW, (None, None, None)),
        ("MistralForCausalLM", WINDOW, (24, 24, 24)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("MistralForCausalLM", WINDOW | {"layer_types": ["sliding_attention"] * 3}, (24, 24, 24)),
        ("Gemma2ForCausalLM", WINDOW, (24, None, 24)),
        ("Gemma2ForCausalLM", {}, (4096, None, 4096)),
        ("Gemma2ForCausalLM", WINDOW | {"layer_types": ALTERNATING}, (None, 24, None)),
        ("Gemma3ForCausalLM", WINDOW, (24, 24, 24)),
        ("GptOssForCausalLM", WINDOW, (24, None, 24)),
        ("GptOssForCausalLM", WINDOW | {"layer_types": ALTERNATING}, (None, 24, None)),
        ("Gemma3ForCausalLM", WINDOW | {"sliding_window_pattern": 3}, (24, 24, None)),
        ("Qwen2ForCausalLM", WINDOW, (None, None, None)),
        ("Qwen2ForCausalLM", WINDOW | {"use_sliding_window": True}, (None, None, None)),
        ("Qwen2ForCausalLM", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}, (None, 24, 24)),
        ("Qwen3ForCausalLM", WINDOW | {"use_sliding_window": True, "max_window_layers": 0}, (24, 24, 24)),
        (
            "Qwen3ForCausalLM",
            WINDOW | {"use_sliding_window": True, "layer_types": ALTERNATING},
            (None, 24, None),
        ),
    ],
)  # fmt: skip
def test_which_layers_have_a_window(
    architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...], raw_config: dict[str, Any],
    write_config: Any,
) -> None:  # fmt: skip
    raw = raw_config | {"architectures": [architecture], "num_hidden_layers": 3} | changes
    config = read_model_config(write_config(raw))
    assert tuple(config.window_of(layer) for layer in range(3)) == windows


def test_what_gemma_configs_leave_out_is_what_transformers_takes(raw_config: dict[str, Any], write_config: Any) -> None:
    two = read_model_config(write_config(raw_config | {"architectures": ["Gemma2ForCausalLM"]}))
    assert (two.head_dim, two.query_scalar, two.is_tied, two.activation) == (256, 256, True, "gelu_tanh")
    assert (two.attention_softcap, two.final_softcap, two.embedding_scale) == (50.0, 30.0, 32**0.5)
    assert two.local_rope is None
    del raw_config["rope_theta"]
    three = read_model_config(write_config(raw_config | {"architectures": ["Gemma3ForCausalLM"]}))
    assert (three.attention_softcap, three.final_softcap) == (None, None)
    assert (three.rope, three.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert three.describe_rope() != replace(three, local_rope=RopeConfig(theta=2e4)).describe_rope()


SMALL_LATENT = {"num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        (architecture, name)
        for architecture, family in sorted(FAMILIES.items())
        for name in sorted(family.defaults.keys() - family.null_fields)
    ],
)
def test_null_is_not_said_and_takes_the_default_of_the_family(
    architecture: str, name: str, raw_config: dict[str, Any], write_config: Any
) -> None:
    raw = raw_config | {"architectures": [architecture], "use_sliding_window": False, "moe_intermediate_size": 24}
    raw |= SMALL_LATENT if FAMILIES[architecture].has_latent else {}
    raw.pop(name, None)
    assert read_model_config(write_config(raw | {name: None})) == read_model_config(write_config(raw))


@pytest.mark.parametrize(
    ("architecture", "changes", "attribute", "value"),
    [
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": None}, "attention_softcap", None),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": None}, "final_softcap", None),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "window", None),
        ("GptOssForCausalLM", {"head_dim": None}, "head_dim", 8),  # hidden size / heads
    ],
)
def test_null_says_none_where_it_does_in_transformers(
    architecture: str, changes: dict[str, Any], attribute: str, value: Any, raw_config: dict[str, Any],
    write_config: Any,
) -> None:  # fmt: skip
    config = read_model_config(write_config(raw_config | {"architectures": [architecture]} | changes))
    assert getattr(config, attribute) == value


def test_null_where_there_is_no_default_is_named(raw_config: dict[str, Any], write_config: Any) -> None:
    latent = raw_config | SMALL_LATENT | {"architectures": ["DeepseekV2ForCausalLM"]}
    for raw, name in (
        (raw_config | {"num_attention_heads": None}, "num_attention_heads"),
        (latent | {"num_experts_per_tok": None}, "num_experts_per_tok"),
        (raw_config | {"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor"),
    ):
        with pytest.raises(ModelError, match=f"{name} is missing"):
            read_model_config(write_config(raw))


def test_rotations_by_layer_type_in_both_spellings(raw_config: dict[str, Any], write_config: Any) -> None:
    gemma = raw_config | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read_model_config(write_config(gemma | {"rope_scaling": scaling, "rope_local_base_freq": 200.0}))
    del gemma["rope_theta"]
    nested = {
        "full_attention": scaling | {"rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    }
    assert read_model_config(write_config(gemma | {"rope_parameters": nested})) == old
    assert [old.rope_of(layer) for layer in (4, 5)] == [old.local_rope, old.rope]
    assert (old.local_rope, old.rope.kind) == (RopeConfig(theta=200.0), "linear")
    wrongs: list[Any] = [{"rope_type": "default"}, {"full_attention": 3}, {"chunked_attention": {}}, [], "default"]
    for wrong in wrongs:
        with pytest.raises(ModelError, match="rope_parameters is"):
            read_model_config(write_config(gemma | {"rope_parameters": wrong}))


def test_layer_types_that_contradict_the_family_are_refused(raw_config: dict[str, Any], write_config: Any) -> None:
    mistral = raw_config | WINDOW | {"architectures": ["MistralForCausalLM"]}
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ModelError, match="layer_types is not supported"):
        read_model_config(write_config(mistral | kinds))
    with pytest.raises(ModelError, match="sliding_attention needs a window"):
        read_model_config(write_config(mistral | kinds | {"sliding_window": None}))


def test_what_positions_take_from_elsewhere(raw_config: dict[str, Any], write_config: Any) -> None:
    def rope(scaling: dict[str, Any], **changes: Any) -> RopeConfig:
        return read_model_config(write_config(raw_config | {"rope_scaling": scaling} | changes)).rope

    assert rope({"type": "yarn", "original_max_position_embeddings": 32}).factor == 4.0, "128 positions of 32"
    assert rope({"type": "yarn", "factor": 2.0}, original_max_position_embeddings=16).original_max_positions == 16
    assert rope({"type": "yarn", "factor": 2.0, "attention_factor": 0.5}).attention_factor == 0.5
    assert rope({"type": "yarn", "factor": 1.0}).attention_factor == 1.0
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert rope(llama3).original_max_positions == 128
    dynamic = rope({"type": "dynamic", "factor": 3.0})
    assert dynamic.longest_context(128) == 384
    assert dynamic.for_context(100, 8) == RopeConfig(theta=5000.0)
    assert dynamic.for_context(256, 8).theta == pytest.approx(5000.0 * 4 ** (8 / 6))
    with pytest.raises(ValueError, match="one length of context"):
        inverse_frequencies(dynamic, 8)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "is not JSON"), ("[]", "not a JSON object"), ("[" * 100_000 + "]" * 100_000, "is not JSON")],
    ids=["cut", "list", "deep"],
)
def test_a_damaged_config_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=complaint):
        read_model_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_model_config(tmp_path)


def test_the_description_of_positions_tells_rotations_apart() -> None:
    kinds = [RopeConfig(), RopeConfig(theta=1e6), RopeConfig(kind="linear", factor=2.0), RopeConfig(kind="llama3")]
    kinds += [RopeConfig(kind="yarn", factor=2.0), RopeConfig(kind="yarn", factor=2.0, is_truncated=False)]
    kinds += [RopeConfig(kind="yarn", factor=2.0, attention_factor=2.0), RopeConfig(kind="dynamic", factor=2.0)]
    assert len({rope.describe() for rope in kinds}) == len(kinds)
    assert RopeConfig(factor=3.0).describe() == RopeConfig().describe()
