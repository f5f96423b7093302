"""Requests for the bundled model."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.core.block_hash import BlockHash
from tandem.core.sampling import SamplingParams
from tandem.engine.request import EngineRequest, RequestKind

MODEL = Path(__file__).resolve().parents[3] / "models" / "tandem-tiny"
ANSWER = 24


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(16, 2000, (length,), generator=generator).tolist())


def request(key: str, prompt: tuple[int, ...], **options: object) -> EngineRequest:
    kind = options.pop("kind", RequestKind.FULL)
    sampling = SamplingParams(**({"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True} | options))  # type: ignore[arg-type]
    return EngineRequest(key=key, prompt=prompt, sampling=sampling, hash_root=BlockHash(bytes(16)), kind=kind)  # type: ignore[arg-type]
