"""Loads a model for computing: weights, kernels, tensors. The part of loading that imports torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from tandem.core.clock import MonotonicClock
from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.errors import ConfigError
from tandem.core.ids import GroupId
from tandem.core.kv_compatibility import Fingerprint
from tandem.core.logs import event
from tandem.core.start_times import StartPhase
from tandem.engine.calibration_text import given_text
from tandem.engine.kv_pool import PoolCopies
from tandem.engine.memory_plan import AutomaticKV, StepBounds
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import ModelSource, fingerprint
from tandem.engine.parallel import TensorGroup
from tandem.engine.runner import ModelRunner
from tandem.engine.swapping import TRIAL_BLOCKS, Swap
from tandem.kvtransfer.kv_pool_access import HostPool, PoolAccess
from tandem.worker.device_pool_io import DevicePool

_log = logging.getLogger(__name__)
LAYER_GROUPS = 4
"""Parts in which a chunk's KV leaves while the rest is computed, unless `layer_group` is set."""


def rank_device(config: WorkerConfig, rank: int) -> str:
    """The device of a rank: with several of them, rank r has GPU r. Raises ConfigError."""
    device, tp = config.settings.device, config.settings.tp
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda" or tp == 1:
        return device
    if torch.cuda.is_available() and torch.cuda.device_count() < tp:
        has = f"this machine has {torch.cuda.device_count()} GPUs"
        raise ConfigError(f"--tp {tp} needs one GPU per rank", why=has, todo="lower --tp, or use --device cpu")
    return f"cuda:{rank}"


def automatic_kv(settings: WorkerSection, device: str) -> AutomaticKV:
    """Share of memory that a worker's KV takes. A GPU is taken to be its own; where a machine's memory was not shared
    out, as between nodes of Ray, a worker takes the same share of it as of the cores."""
    if device != "cpu":
        return AutomaticKV(share=settings.automatic_kv_share)
    cores, ours = len(os.sched_getaffinity(0)), settings.tp * (settings.threads or torch.get_num_threads())
    return AutomaticKV(
        share=settings.automatic_kv_share, memory_bytes=settings.memory_bytes, neighbours=max(1, cores // ours)
    )


def load_model(
    config: WorkerConfig, group: TensorGroup | None = None, enter: Callable[[StartPhase], None] = lambda _: None
) -> tuple[ModelRunner, dict[GroupId, PoolAccess], Fingerprint]:
    """This rank's part of the model on its device, its pools as bytes, and what the model is.

    Ranks above 0 can take in commands of rank 0 after every layer: these do not wait for the whole step.
    """
    settings = config.settings
    if settings.threads:
        torch.set_num_threads(settings.threads)
    rank = group.rank if group is not None else 0
    device = rank_device(config, rank)
    folder = Path(config.model_dir)
    model = read_model_config(folder)
    text = None
    if config.quantize_calibration:
        text = given_text(
            config.quantize_calibration, folder, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
    runner = ModelRunner(
        model_dir=folder,
        dtype=config.dtype,
        quantize=config.quantize,
        calibration=text,
        device=device,
        block_tokens=settings.block_tokens,
        kv_bytes=settings.kv_memory_bytes or None,
        automatic=None if settings.kv_memory_bytes else automatic_kv(settings, device),
        max_model_len=config.max_model_len,
        is_deterministic=settings.is_deterministic,
        layer_group=1 if rank else settings.layer_group or -(-model.layers // LAYER_GROUPS),
        kv_dtype=settings.kv_dtype,
        group=group,
        bounds=StepBounds(tokens=settings.max_step_tokens, sequences=settings.max_sequences),
        enter=enter,
        has_graphs=settings.has_cuda_graphs,
    )
    source = ModelSource(name=config.model, path=folder, commit=config.commit)
    identity = fingerprint(
        source,
        runner.config,
        compute_dtype=runner.dtype,
        weight_quantisation=runner.weight_format,
    )
    return runner, _pools(runner, device), identity


def open_swap(config: WorkerConfig, runner: ModelRunner) -> Swap | None:
    """Open the swap where preempted requests may keep their KV; None, with the reason logged, where they are always
    computed again."""
    settings = config.settings
    if runner.device.type == "cpu":
        why = "KV is already in host memory, so a copy would free nothing that kv_memory_bytes could not use"
    elif settings.tp > 1:
        why = "swapping is not supported with several ranks"
    elif not settings.swap_memory_bytes:
        why = "swap_memory_bytes is 0"
    else:
        swap = Swap(PoolCopies(runner.pools), runner.layout, settings.swap_memory_bytes, MonotonicClock())
        swap.try_speeds(min(TRIAL_BLOCKS, *runner.num_blocks))
        speeds = {"save_bytes_per_s": swap.save_bytes_per_s, "restore_bytes_per_s": swap.restore_bytes_per_s}
        capacity = settings.swap_memory_bytes
        event(_log, "preempted requests may keep their KV", logging.INFO, capacity_bytes=capacity, **speeds)
        return swap
    event(_log, "preempted requests are recomputed", why=why)
    return None


def _pools(runner: ModelRunner, device: str) -> dict[GroupId, PoolAccess]:
    pools: dict[GroupId, PoolAccess] = {}
    for spec in runner.layout.groups:
        if device == "cpu":
            pools[spec.group] = HostPool(spec, runner.layout.tp, runner.pool_bytes(spec.group))
        else:
            pools[spec.group] = DevicePool(spec, runner.layout.tp, runner.pools.tensors[spec.group])
    return pools
