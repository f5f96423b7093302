"""Payloads that stay in a device's memory, as the core sees them: their operations, not their form. No torch.

A link between devices offers rooms to gather into; at the other end arrives a payload that can be scattered, summed or
fetched. It lies in the sender's memory: it counts only if `is_withdrawn` is false once all of it was read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType

from tandem.core.ids import Attempt, BlockId, TransferId
from tandem.kvtransfer.frame import Checksum, Frame
from tandem.kvtransfer.kv_pool_access import PoolAccess, TokenRun


class DeviceRoom(ABC):
    """Reserved for one payload; leaving its context gives up what was not committed."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(
        self, pool: PoolAccess, source: TokenRun, layers: range, heads: range, target_tokens: int
    ) -> tuple[int, Checksum]:
        """Fill it with tokens of a pool that the link `suits`; return the checksum. Errors are the pool's.

        On return the source is read to its end.
        """

    @abstractmethod
    def checksum(self) -> tuple[int, Checksum]:
        """Checksum of the room's present content, for a probe."""

    def __enter__(self) -> DeviceRoom:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        return


class DevicePayload(ABC):
    """One frame's payload at the receiver. Valid on the thread that received it, for the time of the call."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def is_withdrawn(self) -> bool:
        """True if the sender gave up the transfer, or reused the memory for another payload. Once true, always true."""

    @abstractmethod
    def suits(self, pool: PoolAccess) -> bool:
        """True if it can be scattered into `pool` without leaving the device."""

    @abstractmethod
    def scatter(self, pool: PoolAccess, blocks: Sequence[BlockId], layers: range, heads: range, kind: Checksum) -> int:
        """Write it into blocks of a pool that it suits; the checksum of what was written. Errors are the pool's.

        On return all of it has been read and written.
        """

    @abstractmethod
    def checksum(self, kind: Checksum) -> int:
        """The checksum of its bytes; on return all of them have been read."""

    @abstractmethod
    def to_host(self) -> memoryview:
        """The bytes that `checksum` was taken of, in this process's memory."""


class DeviceLink(ABC):
    """Methods of a link, beyond `transports.base.Link`, for payloads that can stay on the device."""

    @abstractmethod
    def suits(self, pool: PoolAccess) -> bool:
        """True if rooms of this link can be filled from `pool`."""

    @abstractmethod
    def reserve_on_device(self, size: int) -> DeviceRoom:
        """Like `reserve`. Raises LinkClosedError."""

    @abstractmethod
    def commit_on_device(self, frame: Frame, room: DeviceRoom) -> None:
        """Like `commit`, of the room reserved last. Raises LinkClosedError."""

    @abstractmethod
    def claim(self, transfer: TransferId, attempt: Attempt) -> None:
        """The room reserved last is about to be filled for this transfer: `withdraw` covers it from now on."""

    @abstractmethod
    def withdraw(self, transfer: TransferId, attempt: Attempt) -> None:
        """From any thread: payloads of this transfer that are in flight no longer count. Does not wait."""


Payload = memoryview | DevicePayload
"""The type of payload that an intake accepts."""
