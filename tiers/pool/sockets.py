"""The sockets of a pool: where it is reached, and whom it reaches.

Sends never wait: a peer that does not read loses the message and asks again. One thread uses all of
it, except `wake`, which any thread may call.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import xxhash
import zmq

from ...fabric.config import PoolConfig
from ...fabric.errors import Refused
from ...fabric.wire import MESSAGE_BYTES_MAX
from .files import PoolFiles

FRAMES_PER_TURN_MAX = 256
"""Messages taken from one socket before the others get their turn."""
FAREWELL_MS = 50
"""For the last messages to leave; they only spare others a wait."""
PIPE_READ_BYTES = 4096
"""One read empties the pipe of all wake-ups that a turn can have missed."""

PORT_FIRST, PORTS = 16_384, 16_384

Ready = dict[object, int]
Socket = zmq.Socket[bytes]


class Dialled(IntEnum):
    """What became of a connection to a source."""

    OPENED = 0
    """Which does not say that anybody is there."""
    REFUSED = 1
    """The endpoint is none that can be reached, or this process has no sockets left."""


@dataclass(frozen=True, slots=True)
class PoolAddresses:
    """Where a pool is reached."""

    node: str
    epoch: int
    client: str
    peer: str
    events: str
    replay: str


@dataclass(frozen=True, slots=True)
class Dealer:
    """A connection to a source, and the socket on which ZeroMQ tells what becomes of it."""

    socket: Socket
    monitor: Socket


class PoolSockets:
    """Bound sockets and connections to sources. Raises `Refused` for an address in use."""

    def __init__(self, config: PoolConfig, epoch: int) -> None:
        self._path = PoolFiles.named(config.host.directory, f"{config.run}-{config.node}").socket
        self._name = f"{config.run}/{config.node}"
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._wake_out, self._wake_in = os.pipe()
        self._dealers: dict[str, Dealer] = {}
        try:
            self.clients = self._bound(zmq.ROUTER, f"ipc://{self._path}", "clients")
            os.chmod(self._path, 0o600)
            self.peers = self._bound(zmq.ROUTER, config.peers.listen, "peers")
            self.events = self._bound(zmq.PUB, config.events.publish, "events")
            self.replay = self._bound(zmq.ROUTER, config.events.replay, "replay")
            # A whole replay at once: what a full queue swallowed the reader would ask for again.
            self.replay.setsockopt(zmq.SNDHWM, 2 * config.events.buffer_batches)
        except BaseException:
            self.close()
            raise
        for socket in (self.clients, self.peers, self.replay):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)
        self.addresses = PoolAddresses(
            config.node,
            epoch,
            f"ipc://{self._path}",
            _endpoint(self.peers),
            _endpoint(self.events),
            _endpoint(self.replay),
        )

    def poll(self, wait_ms: int) -> Ready:
        """Wait until something can be read or `wake` is called; say what can be read."""
        ready: Ready = dict(self._poller.poll(wait_ms))
        if self._wake_out in ready:
            os.read(self._wake_out, PIPE_READ_BYTES)
        return ready

    def received(self, socket: Socket, ready: Ready) -> Iterator[list[bytes]]:
        """Yield the messages that wait on a socket, up to a turn's share."""
        for _ in range(FRAMES_PER_TURN_MAX if socket in ready else 0):
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def from_sources(self, ready: Ready) -> Iterator[tuple[str, list[bytes]]]:
        """Yield what sources answered, with their endpoints."""
        for endpoint, dealer in list(self._dealers.items()):
            for frames in self.received(dealer.socket, ready):
                yield endpoint, frames

    def lost_sources(self, ready: Ready) -> Iterator[str]:
        """Yield the endpoints that refused a connection or closed it: nobody serves there."""
        for endpoint, dealer in list(self._dealers.items()):
            if any(True for _ in self.received(dealer.monitor, ready)):
                yield endpoint

    def connect(self, endpoint: str) -> Dialled:
        """Open a connection to a source."""
        try:
            socket = self._socket(zmq.DEALER)
        except zmq.ZMQError:
            return Dialled.REFUSED
        try:
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close()
            return Dialled.REFUSED
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self._dealers[endpoint] = Dealer(socket, monitor)
        return Dialled.OPENED

    def disconnect(self, endpoint: str) -> None:
        """Close a connection and forget what it has not sent."""
        dealer = self._dealers.pop(endpoint, None)
        if dealer is not None:
            self._poller.unregister(dealer.socket)
            self._poller.unregister(dealer.monitor)
            dealer.socket.disable_monitor()
            dealer.socket.close()

    def ask_source(self, endpoint: str, frame: bytes) -> None:
        """Send to a source; nothing happens if it is not connected."""
        dealer = self._dealers.get(endpoint)
        if dealer is not None:
            send(dealer.socket, [frame])

    def watch(self, descriptor: int) -> None:
        """Let `poll` report a descriptor that can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`."""
        self._poller.unregister(descriptor)

    def wake(self) -> None:
        """End a `poll` that waits. From any thread."""
        os.write(self._wake_in, b"w")

    def close(self) -> None:
        """Close everything and remove the clients' socket file."""
        self._context.destroy(linger=FAREWELL_MS)
        os.close(self._wake_in)
        os.close(self._wake_out)
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            return

    def _socket(self, kind: int) -> Socket:
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        return socket

    def _bound(self, kind: int, endpoint: str, purpose: str) -> Socket:
        socket = self._socket(kind)
        if endpoint.endswith(":*"):
            preferred = f"{endpoint[:-1]}{usual_port(self._name, purpose)}"
            try:
                socket.bind(preferred)
            except zmq.ZMQError:  # somebody else has it: any port will do
                pass
            else:
                return socket
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            problem = f"cannot be bound: {error.strerror}"
            raise Refused(endpoint, problem, "Choose a free address of this host.") from error
        return socket


def usual_port(*what: object) -> int:
    """Return the port that something has whenever it is free, so that it is found after a restart.

    Below the range from which Linux takes ports for outgoing connections.
    """
    return PORT_FIRST + xxhash.xxh32_intdigest(repr(what).encode()) % PORTS


def send(socket: Socket, frames: list[bytes]) -> None:
    """Send without waiting."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError:  # full or gone: the other side asks again
        return


def _endpoint(socket: Socket) -> str:
    value = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(value, bytes)
    return value.decode().rstrip("\0")
