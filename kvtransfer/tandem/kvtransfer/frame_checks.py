"""Checks that a frame must pass before a byte of it counts. Each is its own function: tests disable one and must see a
promise broken. One more guard, coverage, is `Coverage.is_complete`."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId
from tandem.kvtransfer.device_payload import Payload
from tandem.kvtransfer.frame import Frame
from tandem.kvtransfer.ticket import Ticket


def is_of_attempt(frame: Frame, ticket: Ticket) -> bool:
    """The frame is of the ticket's attempt, not of an older or newer one under the same transfer id."""
    return frame.attempt == ticket.attempt


def is_for(frame: Frame, incarnation: Incarnation) -> bool:
    """The frame is meant for this incarnation of the receiver."""
    return frame.dest_incarnation == incarnation


def is_from(frame: Frame, ticket: Ticket) -> bool:
    """The frame comes from the incarnation of the sender that was promised the blocks."""
    return frame.source_incarnation == ticket.sender_incarnation


def is_of_sender(worker: WorkerId, ticket: Ticket) -> bool:
    """The connection that brought the frame is of the worker that was promised the blocks."""
    return worker == ticket.sender


def is_intact(frame: Frame, crc: int) -> bool:
    """The payload has the checksum with which it was sent."""
    return frame.payload_crc == crc


def is_current(payload: Payload) -> bool:
    """The bytes read from the sender's memory were still this frame's when the reading ended. Call it after that."""
    return isinstance(payload, memoryview) or not payload.is_withdrawn
