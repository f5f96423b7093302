"""The metadata of a GGUF file as the fields of a config.json, so that one reader knows what is supported. No torch."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from tandem.core.gguf.model_files import GgufModel
from tandem.core.gguf.tokens import end_token_ids
from tandem.engine.config_fields import Fields
from tandem.engine.gguf.families import family_of
from tandem.engine.gguf.keys import MetadataReader

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_PLAIN = {"F32": "float32", "F16": "float16"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values of Llama 3.1, 3.2 and 3.3; files have the resulting factor for each frequency instead."""
_CLOSE = 1e-5


def read_gguf_fields(path: Path) -> Fields:
    """Return the file's model as fields of a config.json. Raises ModelError with the key that is not supported."""
    model = GgufModel(path)
    family, keys = family_of(model), MetadataReader(model.metadata)
    keys.check(family.reads)
    hidden, heads = keys.positive("embedding_length"), keys.positive("attention.head_count")
    if EMBEDDING not in model.file_of:
        raise keys.error("embedding_length", f"the file has no {EMBEDDING}")
    layers, shape = keys.positive("block_count"), model.tensor(EMBEDDING).shape
    if layers > len(model.file_of):
        raise keys.error("block_count", f"it is {layers}, and the file has {len(model.file_of)} tensors")
    if len(shape) != 2 or shape[1] != hidden:
        raise keys.error("embedding_length", f"it is {hidden}, and {EMBEDDING} is {list(shape)}")
    head_dim = keys.positive("attention.key_length", max(1, hidden // heads))
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "vocab_size": shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.positive("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.positive("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.positive("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": keys.rope(),
        "tie_word_embeddings": HEAD not in model.file_of,
        "hidden_act": "silu",
        "dtype": _dtype(model),
        "eos_token_id": list(end_token_ids(model.metadata)),
    }
    values |= family.more_fields(keys, model)
    for name in () if family.has_latent else ("attention.value_length", "rope.dimension_count"):
        if keys.positive(name, values["head_dim"]) != values["head_dim"]:
            raise keys.error(name, f"heads have {values['head_dim']} numbers, all of which turn")
    if ROPE_FACTORS in model.file_of:
        values["rope_parameters"] = _llama3(model, keys, values["head_dim"])
    return Fields(values, path)


def _dtype(model: GgufModel) -> str:
    """That of most of the numbers in matrices. What is quantised was trained in bfloat16, in nearly all cases."""
    sizes: dict[str, int] = {}
    for name, file in model.file_of.items():
        tensor = file.tensors[name]
        if len(tensor.shape) > 1:
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + math.prod(tensor.shape)
    return _PLAIN.get(max(sizes, key=lambda kind: sizes[kind]), "bfloat16")


def _llama3(model: GgufModel, keys: MetadataReader, head_dim: int) -> dict[str, Any]:
    """Out of `rope_freqs.weight`, what each frequency is divided by. Raises ModelError for other factors than those of
    `_LLAMA3`."""
    tensor, theta = model.tensor(ROPE_FACTORS), keys.rope()["rope_theta"]
    if tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise keys.error("rope.dimension_count", f"{ROPE_FACTORS} is {list(tensor.shape)} of {tensor.kind.name}")
    factors = struct.unpack(f"<{head_dim // 2}f", model.file_of[ROPE_FACTORS].bytes_of(tensor))
    found = {"rope_type": "llama3", "rope_theta": theta, "factor": round(max(factors), 3), **_LLAMA3}
    wanted = [_llama3_factor(theta ** (-2 * place / head_dim), found) for place in range(head_dim // 2)]
    if not all(abs(one / other - 1) < _CLOSE for one, other in zip(factors, wanted, strict=True)):
        raise keys.error("rope.scaling.type", f"{ROPE_FACTORS} is none of a Llama 3, and others are not computed")
    return found


def _llama3_factor(frequency: float, of: dict[str, Any]) -> float:
    """As transformers' `_compute_llama3_parameters` divides a frequency."""
    turns = of["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = of["low_freq_factor"], of["high_freq_factor"], of["factor"]
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(1 / ((1 - smooth) / factor + smooth))
