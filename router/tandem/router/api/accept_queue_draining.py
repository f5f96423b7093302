"""The kernel's backlog of a listening socket: connections that wait to be accepted.

Closing the socket resets them. So first new connections are dropped, then those that wait are accepted. On Linux;
elsewhere nothing is known and no connection held back.
"""

from __future__ import annotations

import ctypes
import socket
import sys

_SO_ATTACH_FILTER = 26
_TCP_INFO_BYTES = 32
_QUEUED_AT = 24
"""Of struct tcp_info, `tcpi_unacked`: of a listening socket, connections that are complete and not accepted."""
_FLAGS_AT, _SYN_ACK, _SYN = 13, 0x12, 0x02
_LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_KEEP_ALL = 0xFFFFFFFF
_DROP_SYN = (  # code, to jump over if true, if false, operand; offsets are from the TCP header
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_AND, 0, 0, _SYN_ACK),
    (_JUMP_IF_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, _KEEP_ALL),
)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def let_nobody_in(listener: socket.socket) -> bool:
    """Drop what asks `listener` for a new connection; handshakes in progress go on. False where that is impossible.

    The client asks again after a second, and then reaches another listener of the port, or is refused.
    """
    if not sys.platform.startswith("linux"):
        return False
    instructions = (_Instruction * len(_DROP_SYN))(*(_Instruction(*one) for one in _DROP_SYN))
    program = _Program(len(_DROP_SYN), instructions)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
    except OSError:  # a kernel without such filters
        return False
    return True


def queued(listener: socket.socket) -> int:
    """Connections that wait to be accepted; 0 where the number is not known."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int.from_bytes(info[_QUEUED_AT : _QUEUED_AT + 4], sys.byteorder)
