"""Payloads that stay in a device's memory, as the core sees them: what can be done with one, not what it is. No torch.

A link between devices offers rooms to gather into; at the other end arrives a payload that can be scattered, summed or
fetched. It lies in memory of the sender's: it counts only if `is_withdrawn` is false once all of it was read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType

from tandem.core.ids import Attempt, BlockId, TransferId
from tandem.kvtransfer.frame import Checksum, Frame
from tandem.kvtransfer.pool import PoolAccess, TokenRun


class DeviceRoom(ABC):
    """Reserved for one payload; leaving its context gives up what was not committed."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(
        self, pool: PoolAccess, source: TokenRun, layers: range, heads: range, target_tokens: int
    ) -> tuple[int, Checksum]:
        """Fill it with tokens of a pool that the link `suits`; the payload's checksum. Errors are the pool's.

        On return the source is read to its end.
        """

    @abstractmethod
    def checksum(self) -> tuple[int, Checksum]:
        """Of whatever lies in it: a probe carries that."""

    def __enter__(self) -> DeviceRoom:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        return


class DevicePayload(ABC):
    """One frame's payload at the receiver, on the thread that was handed it, for the time of the call."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def is_withdrawn(self) -> bool:
        """Whether the sender has given up the transfer, or its memory to another payload. Once true, always true."""

    @abstractmethod
    def suits(self, pool: PoolAccess) -> bool:
        """Whether it can be scattered into `pool` without leaving the device."""

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
    """What a link has on top of `transports.base.Link` if payloads can stay on the device."""

    @abstractmethod
    def suits(self, pool: PoolAccess) -> bool:
        """Whether rooms of this link can be filled from `pool`."""

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
        """From any thread: payloads of this transfer that are under way count no more. Does not wait."""


Payload = memoryview | DevicePayload
"""What an intake is handed."""
