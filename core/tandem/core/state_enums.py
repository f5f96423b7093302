"""Enums that logs, metrics and spans share: phases of a request, reasons of an answer's end, states and roles of
workers."""

from enum import StrEnum


class Phase(StrEnum):
    """Where a request is, in the order it passes through."""

    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in (Phase.FINISHED, Phase.FAILED, Phase.CANCELLED)


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class WorkerState(StrEnum):
    """Availability of a worker for new work. DRAINED: nothing is in flight there any more. FLIPPING: it takes on a
    role. STALLED: a step of its engine does not end; it takes work again once that has ended."""

    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    FLIPPING = "flipping"
    STALLED = "stalled"


class RoleName(StrEnum):
    """Current role of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
