"""Messages between the process that starts ranks and each rank: pickles over a socket pair.

Both ends are this program's own processes, and nobody else has the sockets.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import struct
import threading
from typing import Any

__all__ = ["Channel", "fill_standard_descriptors", "socket_pair"]

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16  # bytes
_MOST_CHUNKS = 256  # in one go, so that one who talks a lot does not keep the others waiting
_FIRST_FREE = 3  # descriptors 0, 1 and 2 are what programs take for stdin, stdout and stderr


class Channel:
    """One end. Any thread may send; one thread receives.

    Attributes:
        ended: the other end is closed and every message was taken.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send one message; waits while the other end is busy.

        Raises:
            OSError: the other end is gone, or the socket's timeout passed.
            Exception: whatever pickling the message raises; nothing was sent.
        """
        body = pickle.dumps(message)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """The next message; waits for it.

        Raises:
            EOFError: the other end is closed.
        """
        while (message := self._next()) is None:
            if not self._read(0):
                raise EOFError("the other end of a rank's channel is closed")
        return message[0]

    def arrived(self) -> list[Any]:
        """Messages that are there, without waiting; sets ``ended``."""
        for _ in range(_MOST_CHUNKS):
            try:
                if not self._read(socket.MSG_DONTWAIT):
                    self.ended = True
                    break
            except BlockingIOError:
                break
        messages = []
        while (message := self._next()) is not None:
            messages.append(message[0])
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, flags: int) -> bool:
        """Take what is there into the buffer; False at the end."""
        try:
            data = self._socket.recv(_CHUNK, flags)
        except ConnectionResetError:  # it ended with messages of ours unread
            return False
        self._buffer += data
        return bool(data)

    def _next(self) -> tuple[Any] | None:
        """The first whole message of the buffer, in a tuple; None where there is none yet."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return (pickle.loads(body),)  # noqa: S301, TID251 - from a process of our own


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets whose descriptors are none of the standard three."""
    first, second = socket.socketpair()
    return _moved(first), _moved(second)


def _moved(end: socket.socket) -> socket.socket:
    descriptor = fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    end.close()
    return socket.socket(fileno=descriptor)


def fill_standard_descriptors() -> None:
    """Lead closed ones of descriptors 0, 1 and 2 nowhere, so that no socket takes their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _FIRST_FREE:
        pass
    os.close(descriptor)
