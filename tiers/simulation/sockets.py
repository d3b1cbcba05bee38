"""How the simulated nodes' frames say which socket and which connection they are for.

A frame is one byte for the socket, eight (big-endian) for the connection, and the message. As with
a ROUTER's identity, an answer reaches only the connection that asked.
"""

from enum import IntEnum

CONNECTION_BYTES = 8


class Socket(IntEnum):
    """What a node listens on."""

    ENGINE = 0
    """The pool's, for engines; and an engine's own."""
    SOURCE = 1
    """The serving side of peers."""
    CONSUMER = 2
    """The pulling side, for answers."""
    EVENT = 3
    """A reader's, for live events."""
    REPLAY = 4
    """The pool's, for replay requests."""
    REPLAYED = 5
    """A reader's, for answers to them."""


def pack(socket: Socket, connection: int, message: bytes) -> bytes:
    """Return a frame."""
    return bytes([socket]) + connection.to_bytes(CONNECTION_BYTES, "big") + message


def unpack(frame: bytes) -> tuple[Socket, int, bytes]:
    """Return socket, connection and message of a frame."""
    end = 1 + CONNECTION_BYTES
    return Socket(frame[0]), int.from_bytes(frame[1:end], "big"), frame[end:]
