"""Sets up the simulated engine: it needs the model's shape and tokenizer, not the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.core.config import SIM_KV_BYTES, WorkerConfig
from tandem.core.errors import StartupError
from tandem.core.ids import GroupId
from tandem.core.kv_compatibility import Fingerprint
from tandem.core.kv_layout import KVLayout
from tandem.core.start_times import StartPhase
from tandem.engine.model_config import check_tp, read_model_config
from tandem.engine.model_source import ModelSource, sim_fingerprint
from tandem.engine.pool_plan import block_counts, context_length, human_size, kv_layout
from tandem.engine.sim.runner import SimRunner
from tandem.kvtransfer.kv_pool_access import HostPool, PoolAccess

if TYPE_CHECKING:
    from tandem.engine.parallel import TensorGroup

LAYER_GROUPS = 4
"""As for a computed model: parts in which a chunk's KV leaves, unless `layer_group` is set."""


def load_sim(
    config: WorkerConfig, group: TensorGroup | None = None, enter: Callable[[StartPhase], None] = lambda _: None
) -> tuple[SimRunner, dict[GroupId, PoolAccess], Fingerprint]:
    """This rank's runner, its pools as bytes, and what it is. Raises ModelError, ConfigError or StartupError.

    KV is kept in `kv_dtype`; "auto" means the configured dtype, or the checkpoint's.
    """
    settings, folder = config.settings, Path(config.model_dir)
    model = read_model_config(folder)
    tp = group.size if group is not None else 1
    check_tp(model, tp)
    dtype = next(name for name in (settings.kv_dtype, config.dtype, model.dtype) if name != "auto")
    # Its arithmetic reads the whole context back, so it keeps that.
    layout = kv_layout(model, dtype=dtype, block_tokens=settings.block_tokens, tp=tp, has_windows=False)
    max_model_len = context_length(config.max_model_len, model)
    kv_bytes = settings.kv_memory_bytes or max(SIM_KV_BYTES, _context_bytes(layout, max_model_len))
    counts = block_counts(layout, kv_bytes, None, max_model_len)
    enter(StartPhase.POOL)
    try:
        runner = SimRunner(
            layout,
            counts,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=model.eos_token_ids,
            layer_group=settings.layer_group or -(-model.layers // LAYER_GROUPS),
            timing=settings.sim,
            group=group,
        )
    except OSError as error:
        raise StartupError(
            f"cannot allocate {human_size(kv_bytes)} of KV memory", why=str(error),
            todo="lower --kv-memory",
        ) from error  # fmt: skip
    pools: dict[GroupId, PoolAccess] = {
        spec.group: HostPool(spec, tp, runner.pool_bytes(spec.group)) for spec in layout.groups
    }
    source = ModelSource(name=config.model, path=folder, commit=config.commit)
    return runner, pools, sim_fingerprint(source, model)


def _context_bytes(layout: KVLayout, tokens: int) -> int:
    """KV bytes of one sequence of so many tokens, on one rank."""
    return sum(group.blocks_for(tokens) * group.block_bytes(layout.tp) for group in layout.groups)
