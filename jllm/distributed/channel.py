"""Sends messages between two processes that trust each other: JSON, then arrays, over a connected socket."""

import json
import select
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np

from jllm.errors import RemoteError
from jllm.files.safetensors_io import NAMES, STORED

MOST = 1 << 26  # bytes of a message without its arrays
# A host that vanished is noticed after 50 seconds without data. TCP_USER_TIMEOUT is not set: it would also end a
# connection to a live process that reads nothing while it compiles.
ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})


class Channel:
    """One end of a connection.

    A message is the length of its JSON in 8 bytes, the JSON, and the bytes of the named arrays. All methods but close
    raise RemoteError once the other end has gone or sent an invalid message.
    """

    def __init__(self, connection: socket.socket):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in ALIVE.items():
                if hasattr(socket, name):  # not on every platform
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError as error:
            raise RemoteError(f"the other process has gone: {error.strerror or error}") from None
        self._socket = connection

    def waiting(self, seconds: float | None) -> bool:
        """Returns whether a message (or the end) comes within these seconds; None waits for one."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def send(self, message: Mapping[str, Any] | bytes, arrays: Mapping[str, np.ndarray] = NOTHING) -> None:
        """Sends a message and arrays, which have dtypes that safetensors have. `message` may be `encoded` already, with
        these arrays."""
        text = message if isinstance(message, bytes) else encoded(message, arrays)
        try:
            self._socket.sendall(text)
            for x in arrays.values():
                self._socket.sendall(memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8)))
        except OSError as error:
            raise RemoteError(f"the other process has gone: {error.strerror or error}") from None

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Waits for the next message, and returns it with its arrays."""
        (length,) = struct.unpack("<Q", self._exactly(np.empty(8, np.uint8)))
        if length > MOST:
            raise RemoteError(f"invalid message of {length} bytes from the other process")
        text = bytes(self._exactly(np.empty(length, np.uint8)))
        try:
            found = json.loads(text)
            message, named = dict(found["message"]), found["arrays"]
            arrays = {str(name): np.empty(tuple(shape), STORED[dtype]) for name, dtype, shape in named}
        except (ValueError, KeyError, TypeError, MemoryError, RecursionError) as error:
            raise RemoteError(f"invalid message from the other process: {error}") from None
        for x in arrays.values():
            self._exactly(x.reshape(-1).view(np.uint8))
        return message, arrays

    def _exactly(self, out: np.ndarray) -> np.ndarray:
        view = memoryview(out)
        while len(view):
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise RemoteError(f"the other process has gone: {error.strerror or error}") from None
            if not count:
                raise RemoteError("the other process has gone: it closed the connection")
            view = view[count:]
        return out

    def end(self) -> None:
        """Ends the connection for both processes, and wakes threads that wait on it here."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._socket.close()


def encoded(message: Mapping[str, Any], arrays: Mapping[str, np.ndarray] = NOTHING) -> bytes:
    """Returns a message's length and JSON as bytes. Raises TypeError for values that JSON cannot hold."""
    named = [[name, NAMES[x.dtype], list(x.shape)] for name, x in arrays.items()]
    text = json.dumps({"message": message, "arrays": named}, default=_plain).encode()
    return struct.pack("<Q", len(text)) + text


def _plain(value: Any) -> Any:
    """Returns a NumPy scalar as Python's number."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} cannot be sent")


def connect(address: str, seconds: float) -> Channel:
    """Returns a channel to HOST:PORT. Raises RemoteError if no process accepts the connection within these seconds."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RemoteError(f"an address must be HOST:PORT, not {address!r}")
    try:
        connection = socket.create_connection((host, int(port)), seconds)
    except (OSError, OverflowError) as error:
        raise RemoteError(f"nothing listens at {address}: {getattr(error, 'strerror', None) or error}") from None
    connection.settimeout(None)
    return Channel(connection)
