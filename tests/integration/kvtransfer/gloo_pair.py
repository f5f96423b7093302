"""The two ends of gloo communicators, as a link makes them, without a link."""

import queue
import socket
import threading

from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.control_socket import ControlSocket
from tandem.kvtransfer.transports.gloo_communicator import RECEIVER_RANK, SENDER_RANK, GlooCommunicator, Transfer

SIZE = 4 << 20


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = socket.create_connection(listening.getsockname())
        return dialled, listening.accept()[0]


class Pair:
    """Both ranks' communicators, made as a link makes them."""

    def __init__(self, size: int = SIZE) -> None:
        dialled, accepted = connected()
        self.controls = ControlSocket(dialled), ControlSocket(accepted)
        made: queue.SimpleQueue[GlooCommunicator] = queue.SimpleQueue()
        other = threading.Thread(target=lambda: made.put(GlooCommunicator(self.controls[1], RECEIVER_RANK, size)))
        other.start()
        self.sender = GlooCommunicator(self.controls[0], SENDER_RANK, size)
        other.join()
        self.receiver = made.get()

    def close(self) -> None:
        for end in (self.sender, self.receiver):
            end.abort()
            end.release()
        for control in self.controls:
            control.release()


def outcome_of(transfer: Transfer) -> queue.SimpleQueue[str]:
    """Return the queue with the outcome for a thread that waits for `transfer`."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait() -> None:
        try:
            transfer.wait()
            told.put("")
        except LinkClosedError as error:
            told.put(str(error))

    threading.Thread(target=wait, daemon=True).start()
    return told
