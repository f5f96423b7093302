"""Plans the uses of a rank's memory before any of it is taken. Pure arithmetic; imports no torch.

    weights       as they lie in memory
    KV            the pools, all blocks
    activations   memory of a layer for the largest step beside the residual stream: its widest moment, and the tables
                  of rotations; on a CPU keys and values of the longest context in a row, and the attention masks
    sampler       logits of the largest step, as the head makes them and in fp32, and the copies for choosing tokens
    graphs        on a GPU: memory of captured decode steps (`decode_graphs`)

Activations, sampler and graphs are upper bounds by arithmetic, not measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.core.errors import StartupError
from tandem.core.kv_layout import DTYPE_BYTES, KVLayout
from tandem.engine.model_config import ModelConfig
from tandem.engine.pool_plan import human_size

SCORED_LOGITS = 1 << 25
"""Logits of prompt tokens that one step computes at most: 128 MiB of them."""
_WORKSPACE_BYTES = 32 << 20
"""Memory that kernels and the matrix library keep for themselves."""
_LOGPROB_LOGITS = 1 << 24
"""Logits for which the log-softmax is in memory at once (see `sampler`)."""
_SAMPLER_BYTES = 32
"""For each logit that a token is chosen from: scores, heated scores, probabilities, their sum in float64, order."""
_LOGPROB_BYTES = 13
"""For each logit with a reported log-probability: that, whether it is larger, and the same as a number to add up."""
REORDERED_BYTES = 32 << 20
"""As in the kernel `flash` of extend_attention: this module imports no torch."""
_CODE_WIDTHS = range(32, 257, 32)
"""Of heads that the C code of extend_attention has; others take torch's kernel there."""
_PARTS_IN_MEMORY = 3
"""Memory returned by one part is kept, and does not always serve the next one."""
_REPEATABLE_GATE_BYTES = 16
"""For each gate of an MLP in deterministic mode: it and its partner, and what a written-out activation has in fp32."""
_MEMORY_INFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """The largest step: tokens, and choices that sample in it."""

    tokens: int = 512
    sequences: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank."""

    weights: int
    kv: int
    activations: int
    sampler: int
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.sampler + self.graphs

    def fields(self) -> dict[str, int]:
        """The plan as fields of a log event."""
        return {f"{name}_bytes": size for name, size in (*asdict(self).items(), ("total", self.total))}

    def words(self) -> str:
        """The plan as text for people."""
        parts = ", ".join(f"{_WORDS[name]} {human_size(size)}" for name, size in asdict(self).items() if size)
        return f"memory of a rank: {human_size(self.total)}: {parts}"

    def check(self, free: int, ranks: int = 1) -> None:
        """Raise StartupError if `ranks` of these do not fit `free` bytes."""
        if self.total * ranks <= free:
            return
        beside = (self.total - self.kv) * ranks
        if beside < free:
            todo = f"give --kv-memory {(free - beside) // ranks >> 20}MiB or less"
        else:
            todo = "use a machine with more memory, a smaller model or, on several devices, a larger --tp"
        each = f"each of its {ranks} ranks" if ranks > 1 else "it"
        parts = [f"{human_size(size)} for {_WORDS[name]}" for name, size in asdict(self).items() if size]
        raise StartupError(
            f"the worker needs {human_size(self.total * ranks)} of memory and {human_size(free)} are free",
            why=f"{each} takes {', '.join(parts)}",
            todo=todo,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticKV:
    """Amount of KV for a worker without a configured size.

    Of free memory it takes its part, by `memory_bytes` or, where that is 0, one of `neighbours` (workers that share the
    machine); of that part, beside weights and steps, `share`: the rest is for other programs, and for needs that only a
    measurement would show. At least one sequence of the longest context, at most as many as may run at once: more would
    be for cached prefixes alone.
    """

    share: float = 0.5
    memory_bytes: int = 0
    neighbours: int = 1

    def kv_bytes(self, one: MemoryPlan, free: int, *, ranks: int, sequences: int, max_positions: int) -> int:
        """Bytes of KV for each of `ranks` that share the `free` bytes. `one`: the plan of a rank with KV for one
        sequence of `max_positions` tokens. Raises StartupError where that does not fit."""
        part = min(free, self.memory_bytes or free // self.neighbours)
        beside = one.total - one.kv
        left = part // ranks - beside
        if left >= one.kv:
            return max(one.kv, min(int(self.share * left), sequences * one.kv))
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        fits = max(0, left) * max_positions // one.kv
        todo = f"give --max-model-len {fits} or less, or " if fits >= 16 else ""
        raise StartupError(
            f"no KV for one sequence of {max_positions} tokens: it takes {human_size(one.kv)}{each}",
            why=f"of {human_size(part)} that this worker may take, {human_size(beside)} go to weights and steps{each}",
            todo=f"{todo}start fewer workers, or use a machine with more memory or a smaller model",
        )


_WORDS = {
    "weights": "weights", "kv": "KV", "activations": "activations", "sampler": "the sampler", "graphs": "CUDA graphs",
}  # fmt: skip


def plan_memory(
    config: ModelConfig, layout: KVLayout, num_blocks: tuple[int, ...], *,
    dtype: str, weight_bytes: int, max_positions: int, bounds: StepBounds, is_cpu: bool, is_deterministic: bool = False,
) -> MemoryPlan:  # fmt: skip
    """Return the plan of one rank of `layout.tp` with `weight_bytes` of weights, computing in `dtype`."""
    size, tp = DTYPE_BYTES[dtype], layout.tp
    gate = _REPEATABLE_GATE_BYTES if is_deterministic else 3 * size
    attention = _attention_bytes(config, size, tp, is_deterministic=is_deterministic)
    mlp = gate * (config.intermediate // tp) + size * config.hidden if config.dense_layers else 0
    token = config.hidden * (2 * size + 8) + max(attention, mlp, _experts_bytes(config, size, tp, gate, is_cpu=is_cpu))
    tables = 2 * size * config.head_dim * (max_positions + bounds.tokens) * (2 if config.local_rope else 1)
    gathered = _gathered_bytes(config, layout, num_blocks, dtype, max_positions, bounds.tokens) if is_cpu else 0
    rows = min(bounds.tokens, bounds.sequences + max(SCORED_LOGITS // config.vocab_size, 16))
    sampling = min(rows, bounds.sequences) * config.vocab_size
    logprobs = _LOGPROB_BYTES * min(rows * config.vocab_size, _LOGPROB_LOGITS + config.vocab_size)
    # On a CPU tokens are drawn from a few rows at a time; what is left is a copy of the scores.
    chosen = sampling * (4 if is_cpu else _SAMPLER_BYTES)
    return MemoryPlan(
        weights=weight_bytes,
        kv=sum(group.block_bytes(tp) * count for group, count in zip(layout.groups, num_blocks, strict=True)),
        activations=bounds.tokens * token + tables + gathered + _WORKSPACE_BYTES,
        sampler=rows * config.vocab_size * (size + 4) + max(chosen, logprobs),
    )


def _attention_bytes(config: ModelConfig, size: int, tp: int, *, is_deterministic: bool) -> int:
    """Of one token: projections, their rotated part and the halves that are added up for it, and the answer."""
    heads, kv_heads = config.heads // tp, max(1, config.kv_heads // tp)
    exact = 8 if is_deterministic else 0  # queries, and what attention answers, in fp32
    if config.latent is not None:
        return (size + exact) * config.latent.token_numbers(heads)
    # Fused projection, its rotated half and the halves that are added up for it, and what attention answers.
    attention = size * config.head_dim * (4 * heads + 4 * kv_heads)
    if config.has_qk_norm:
        attention += 8 * config.head_dim * (heads + kv_heads)  # in fp32, before and after
    return attention + exact * config.head_dim * heads


def _experts_bytes(config: ModelConfig, size: int, tp: int, gate: int, *, is_cpu: bool) -> int:
    """A token's share of the widest moment of a layer of experts: its row for each of them, its scores, and what either
    an expert that all tokens chose takes, or the sum of the answers in fp32, or what shared experts take beside it;
    `gate` bytes a gate. On a GPU all experts run at once, and their activations of all pairs are in memory."""
    experts, hidden = config.experts, config.hidden
    if experts is None:
        return 0
    widest = max(gate * (experts.intermediate // tp) + size * hidden, hidden * (8 + 2 * size))
    widest = max(widest, gate * (experts.shared // tp) + size * 2 * hidden)
    if not is_cpu:
        widest = max(widest, size * (experts.per_token * experts.intermediate // tp + hidden))
    return experts.per_token * (hidden * size + 6 * 8) + experts.count * (size + 8) + widest


def _gathered_bytes(
    config: ModelConfig, layout: KVLayout, num_blocks: tuple[int, ...], dtype: str, max_positions: int, tokens: int
) -> int:
    """Of prefill attention on a CPU, in bfloat16 or in layers without window and soft cap: keys and values of one
    sequence, as stored and as computed with, and which of them each token sees, as truth and as a number to add; where
    torch computes in bfloat16, once more for the query heads."""
    is_plain = config.attention_softcap is None and len(config.windowed_layers) < config.layers
    if dtype != "bfloat16" and not is_plain:
        return 0
    size, most = DTYPE_BYTES[dtype], 0
    for group, count in zip(layout.groups, num_blocks, strict=True):
        blocks = min(group.blocks_for(max_positions), count)
        stored = blocks * group.layer_bytes(layout.tp)
        converted = 0 if group.dtype == dtype else stored // DTYPE_BYTES[group.dtype] * size
        context = blocks * group.block_tokens
        is_torchs = dtype == "bfloat16" and not (group.dtype == dtype and config.kv_shape.width in _CODE_WIDTHS)
        reordered = 0
        if is_plain and is_torchs:  # or in float32, on a CPU that has no products of bfloat16
            widened = stored // DTYPE_BYTES[group.dtype] * DTYPE_BYTES["float32"]
            reordered = max(_reordered_bytes(config, layout.tp, context), widened - converted)
        most = max(most, stored + converted + reordered + tokens * context * (1 + size))
    return most


def _reordered_bytes(config: ModelConfig, tp: int, context: int) -> int:
    """Keys and values of `context` tokens for every query head, in parts as `REORDERED_BYTES` allow."""
    shape = config.kv_shape
    head = 2 * context * shape.width * DTYPE_BYTES["bfloat16"]
    every = config.heads // tp * head
    fewest = head * (shape.heads if shape.is_replicated else max(1, shape.heads // tp))
    return min(every, _PARTS_IN_MEMORY * max(fewest, REORDERED_BYTES)) if every > REORDERED_BYTES else every


def free_host_bytes(info: Path = _MEMORY_INFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that this process can take before something is swapped out or killed; None where it is unknown.

    The smaller one of what the machine has and what the container may still take. Cached files make room.
    """
    found = [free for free in (_machine_bytes(info), _container_bytes(cgroup)) if free is not None]
    return min(found, default=None)


def _machine_bytes(info: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _container_bytes(cgroup: Path) -> int | None:
    """Bytes left by control groups, version 2 or else 1."""
    first = cgroup / "memory"
    for limit, usage, stat, prefix in (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat", ""),
        (first / "memory.limit_in_bytes", first / "memory.usage_in_bytes", first / "memory.stat", "total_"),
    ):
        try:
            most = int(limit.read_text())  # "max": there is none
            counts = dict(line.split() for line in stat.read_text().splitlines())
            cached = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
            return most - int(usage.read_text()) + cached
        except (OSError, ValueError):
            continue
    return None
