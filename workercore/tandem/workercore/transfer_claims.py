"""The worker's claims of transfers that it works on, for audits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.core.ids import Incarnation, TransferId, WorkerId


@dataclass(frozen=True, slots=True)
class Claim:
    """One transfer. "reservation": granted, not admitted; or requested from another worker that holds the blocks.
    "handover": being pushed, or kept for that, not ended. "quiescing": given up, and its source may still be read (then
    the peer is not known any more: "" and 0)."""

    kind: Literal["reservation", "handover", "quiescing"]
    key: str
    transfer: TransferId
    peer: WorkerId
    peer_incarnation: Incarnation
