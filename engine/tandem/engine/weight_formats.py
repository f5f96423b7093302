"""Formats of weights that `--quantize` names, and the choices of "auto"; without torch."""

from __future__ import annotations

QUANTISATIONS = ("none", "auto", "int8", "w8a8", "int4", "w4a16")
"""Values of `--quantize`."""
WEIGHT_BYTES = {"int8": 1.0, "w8a8": 1.0, "int4": 18 / 32, "w4a16": 18 / 32}
"""Bytes of a quantised number in memory, with the scales and offsets of groups."""
QUANTISED_FAMILIES = frozenset({
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM",
})  # fmt: skip
"""Architectures in which every matrix is a product of rows, the only kind that is quantised."""
QUANTISED_DTYPES = ("float32", "bfloat16")
"""Compute dtypes that quantised products answer in."""


def chosen_dtype(stored: str, *, is_on_cpu: bool) -> str:
    """The compute dtype for `--dtype auto` and weights in `stored`: CPUs have no code of ours for float16."""
    return "bfloat16" if is_on_cpu and stored == "float16" else stored


def chosen_format(kind: str, architecture: str, *, dtype: str, is_on_cpu: bool) -> str:
    """The format for `--quantize kind`: of "auto" `int8` where its products exist and "none" elsewhere, else `kind`.

    `int8` reads half of bfloat16's bytes for a token, at a perplexity within 0.5 %. The choice depends neither on the
    role nor on the CPU's level, so that all workers of a model on CPUs compute the same KV.
    """
    if kind != "auto":
        return kind
    has_products = is_on_cpu and architecture in QUANTISED_FAMILIES and dtype in QUANTISED_DTYPES
    return "int8" if has_products else "none"
