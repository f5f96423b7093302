"""KV size of a pool's workers, as far as it can be computed before any of them runs.

Sizes that are given are exact. An automatic one is computed by the worker when it starts; here it is computed from
the memory free now and from the size of the weights, by the same arithmetic (`AutomaticKV`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.controlplane import gpu_free_check
from tandem.core.config import SIM_KV_BYTES, WorkerSection
from tandem.core.errors import StartupError
from tandem.core.kv_layout import DTYPE_BYTES, KVLayout
from tandem.engine.memory_plan import AutomaticKV, StepBounds, plan_memory
from tandem.engine.model_config import ModelConfig, read_model_config, tp_refusal
from tandem.engine.model_work import model_work
from tandem.engine.pool_plan import context_length, human_size, kv_layout, kv_tokens, plan_blocks
from tandem.engine.weight_formats import chosen_dtype, chosen_format


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """Of one worker. `memory_bytes`: of each rank. None: it is computed where the worker starts."""

    is_automatic: bool
    memory_bytes: int | None = None
    tokens: int | None = None
    max_model_len: int = 0

    @property
    def contexts(self) -> float | None:
        """Return how many sequences of the longest context it holds."""
        return None if self.tokens is None or not self.max_model_len else self.tokens / self.max_model_len

    def words(self) -> str:
        """Format the plan, such as "about 512MiB of KV, 209,712 tokens, 51.2 full contexts"."""
        if self.memory_bytes is None or self.tokens is None or self.contexts is None:
            return "KV as there is room" if self.memory_bytes is None else f"{human_size(self.memory_bytes)} of KV"
        about = "about " if self.is_automatic else ""
        size = human_size(self.memory_bytes)
        return f"{about}{size} of KV, {self.tokens:,} tokens, {self.contexts:.1f} full contexts"


def kv_plan(model_dir: Path, settings: WorkerSection, *, dtype: str, quantize: str, max_model_len: int) -> KVPlan:
    """Return the plan for workers of that model with these settings; workers report sizes that do not fit. Raises
    ModelError."""
    model, is_sim = read_model_config(model_dir), settings.engine == "sim"
    longest = context_length(max_model_len, model)
    if tp_refusal(model, settings.tp):
        return KVPlan(is_automatic=not settings.kv_memory_bytes)
    computed = chosen_dtype(model.dtype, is_on_cpu=not _may_have_gpu(settings)) if dtype == "auto" else dtype
    stored = computed if settings.kv_dtype == "auto" else settings.kv_dtype
    layout = kv_layout(
        model, dtype=stored, block_tokens=settings.block_tokens, tp=settings.tp, has_windows=not is_sim
    )  # fmt: skip
    one = tuple(group.blocks_for(longest) for group in layout.groups)
    size: int | None = settings.kv_memory_bytes
    try:
        if not size and is_sim:
            size = max(SIM_KV_BYTES, sum(n * g.block_bytes(layout.tp) for n, g in zip(one, layout.groups, strict=True)))
        elif not size and settings.memory_bytes and not _may_have_gpu(settings):
            bounds = StepBounds(tokens=settings.max_step_tokens, sequences=settings.max_sequences)
            weights = weight_bytes(model, layout, computed, quantize) // settings.tp
            plan = plan_memory(
                model.for_context(longest), layout, one, dtype=computed, weight_bytes=weights, max_positions=longest,
                bounds=bounds, is_cpu=True, is_deterministic=settings.is_deterministic,
            )  # fmt: skip
            size = AutomaticKV(share=settings.automatic_kv_share).kv_bytes(
                plan, settings.memory_bytes, ranks=settings.tp, sequences=bounds.sequences, max_positions=longest
            )  # fmt: skip
        if not size:
            return KVPlan(is_automatic=True, max_model_len=longest)
        tokens = kv_tokens(layout, plan_blocks(layout, size, longest))
    except StartupError:
        return KVPlan(is_automatic=not settings.kv_memory_bytes, memory_bytes=size or None, max_model_len=longest)
    return KVPlan(
        is_automatic=not settings.kv_memory_bytes, memory_bytes=size, tokens=tokens, max_model_len=longest
    )  # fmt: skip


def _may_have_gpu(settings: WorkerSection) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and gpu_free_check.can_tell())


def weight_bytes(model: ModelConfig, layout: KVLayout, dtype: str, quantize: str) -> int:
    """Compute the bytes that loaded weights take on a CPU: products' matrices as `quantize` keeps them, the head among
    them, and a table of embeddings in `dtype`; norms and biases are small."""
    kind = chosen_format(quantize, model.architecture, dtype=dtype, is_on_cpu=True)
    work = model_work(model, dtype=dtype, layout=layout, quantize=kind)
    experts = 0 if (of := work.experts) is None else of.expert_bytes * of.count * (of.token_layers + of.row_layers)
    return (
        work.token_weight_bytes + work.row_weight_bytes + experts + model.vocab_size * model.hidden * DTYPE_BYTES[dtype]
    )
