"""The same steps by llama.cpp in bfloat16, where `llama-cpp-python` and `gguf` are installed (pip compiles the first).

For speed alone: weights are a checkpoint's own, but heads stay in its order, so that answers would differ.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bench.engine.steps import Shape

_TOKEN = 5
_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

_kept: list[Any] = []
"""Callbacks of llama.cpp, kept as long as the process lives."""


def takes(model: Path) -> bool:
    """True if both packages are installed, and the checkpoint is a Llama's."""
    is_llama = json.loads((model / "config.json").read_text()).get("model_type") == "llama"
    return is_llama and find_spec("llama_cpp") is not None and find_spec("gguf") is not None


def steps(model: Path, every: Sequence[Shape]) -> Iterator[tuple[Shape, Callable[[], None]]]:
    """Each shape with its step, of a Llama checkpoint in `model`, with the threads that torch has now.

    Raises RuntimeError where llama.cpp refuses the model or a step.
    """
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    _kept.append(quiet)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        _convert(model, file)
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_mmap = False  # the file goes away
        loaded = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
    if not loaded:
        raise RuntimeError(f"llama.cpp does not load what was made of {model}")
    for shape in every:
        yield shape, _step(llama_cpp, loaded, shape)


def _step(library: Any, loaded: Any, shape: Shape) -> Callable[[], None]:
    sequences, context = max(shape.batch, 1), max(shape.tokens, shape.batch_context)
    parameters = library.llama_context_default_params()
    parameters.n_ctx, parameters.n_seq_max = sequences * -(-context // 256) * 256, sequences
    parameters.n_batch = max(parameters.n_batch, context)
    parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
    running = library.llama_init_from_model(loaded, parameters)
    if not running:
        raise RuntimeError(f"llama.cpp has no context for {shape}")
    memory = library.llama_get_memory(running)

    def decode(tokens: list[tuple[int, int]]) -> None:
        """Decode of (sequence, position), with the logits of each sequence's last."""
        batch = library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, (sequence, position) in enumerate(tokens):
            batch.token[place], batch.pos[place] = _TOKEN, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = place + 1 == len(tokens) or tokens[place + 1][0] != sequence
        status = library.llama_decode(running, batch)
        library.llama_synchronize(running)
        library.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama.cpp answers a step of {shape} with {status}")

    first = 0
    if shape.batch:
        first = shape.batch_context - 1
        for sequence in range(shape.batch):
            decode([(sequence, position) for position in range(first)])
    tokens = [(sequence, position) for sequence in range(sequences) for position in range(first, context)]

    def step() -> None:
        for sequence in range(sequences):
            library.llama_memory_seq_rm(memory, sequence, first, -1)
        decode(tokens)

    return step


def _convert(model: Path, file: Path) -> None:
    """A checkpoint of Llama as GGUF, matrices in bfloat16, without a vocabulary."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType.BF16
    for part in sorted(model.glob("*.safetensors")):
        with safe_open(part, framework="pt") as tensors:
            for key in sorted(tensors.keys()):
                numbers = tensors.get_tensor(key).float().numpy()
                is_matrix = numbers.ndim == 2
                data = gguf.quants.quantize(numbers, kind) if is_matrix else numbers
                writer.add_tensor(_name(key), data, raw_dtype=kind if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(key: str) -> str:
    """llama.cpp's name of a tensor."""
    stem, _, kind = key.rpartition(".")
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[inner]}.{kind}"
