"""Parameters of a listener, equal for every transport."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.core.ids import Rank
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.receiver_core import ReceiverCore


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """A listener's rank, intake and addresses. `on_device`: the pools lie in a GPU's memory."""

    intake: ReceiverCore
    secret: ClusterSecret
    rank: Rank
    runtime_dir: Path
    bind_host: str
    advertise_host: str
    ring_bytes: int
    on_device: bool
