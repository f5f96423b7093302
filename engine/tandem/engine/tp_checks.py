"""Checks over how many ranks a model can be split, with reasons. Imports no torch: `clusterctl up` may call it."""

from __future__ import annotations

from tandem.core.errors import ModelError
from tandem.engine.model_config import ModelConfig

TP_SIZES = (1, 2, 3, 4, 8)
SPOKEN_SIZES = f"{', '.join(map(str, TP_SIZES[:-1]))} or {TP_SIZES[-1]}"


def tp_refusal(config: ModelConfig, tp: int) -> str:
    """Return why the model cannot be split over `tp` ranks; "" if it can. The vocabulary always fits: it is padded."""
    if tp not in TP_SIZES:
        return f"a worker has {SPOKEN_SIZES} ranks"
    if config.heads % tp:
        return f"its {config.heads} query heads cannot be split evenly over {tp} ranks"
    if config.kv_heads % tp and tp % config.kv_heads:
        return f"its {config.kv_heads} KV heads can neither be split nor repeated evenly over {tp} ranks"
    if config.dense_layers and config.intermediate % tp:
        return f"its {config.intermediate} intermediate features cannot be split evenly over {tp} ranks"
    if config.experts is not None and config.experts.intermediate % tp:
        return f"its experts' {config.experts.intermediate} features cannot be split evenly over {tp} ranks"
    if config.experts is not None and config.experts.shared % tp:
        return f"its shared experts' {config.experts.shared} features cannot be split evenly over {tp} ranks"
    return ""


def fitting_tp(config: ModelConfig) -> tuple[int, ...]:
    """The TP sizes that fit the model, smallest first; 1 always does."""
    return tuple(tp for tp in TP_SIZES if not tp_refusal(config, tp))


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raise ModelError, with the sizes that fit, unless the model can be split over `tp` ranks."""
    why = tp_refusal(config, tp)
    if why:
        fits = ", ".join(str(size) for size in fitting_tp(config))
        raise ModelError(f"--tp {tp} does not fit the model ({config.architecture})", why=why, todo=f"use --tp {fits}")
