"""Copies numbers between host and device without waiting for the device's work. On a CPU they are plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Upload `values` as a tensor [n] on `device`. From pinned memory, because other copies wait for the stream."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Download:
    """Copies of tensors on their way to the host, behind everything that is queued on the stream now."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._tensors = tuple(torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors)
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors on the host, once they are there. Raises an error of the device."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
