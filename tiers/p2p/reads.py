"""Carries out the consumer's reads: a transport for the bytes, an executor for the checksums.

Checksums are computed on the executor's threads, so that verifying one batch overlaps the reading
of the next. Everything else happens on the caller's thread, in `start` and `poll`.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from ...fabric.checksum import checksum
from ...fabric.errors import Malformed
from .actions import Arrival, RemovePeer, StartRead, StartVerify
from .transport import ReadItem, ReadState, Transport


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A read is terminal: nothing of it is written any more. For `PullConsumer.on_read_done`."""

    read_id: int
    state: ReadState


@dataclass(frozen=True, slots=True)
class Verified:
    """What the chunks of a read sum up to. For `PullConsumer.on_verified`."""

    read_id: int
    checksums: tuple[int, ...]


class Reads:
    """The reads and verifications under way."""

    def __init__(
        self,
        transport: Transport,
        executor: Executor,
        summed: Callable[[memoryview], int] = checksum,
    ) -> None:
        self._transport, self._executor, self._summed = transport, executor, summed
        self._peers: dict[bytes, str] = {}
        self._handles: dict[int, int] = {}
        self._futures: dict[int, Future[tuple[int, ...]]] = {}
        self._failed: list[int] = []

    @property
    def running(self) -> bool:
        """Whether a read is under way, which only looking moves on."""
        return bool(self._handles or self._failed)

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something to say sooner or later."""
        return bool(self._handles or self._futures or self._failed)

    def do(self, action: StartRead | StartVerify | RemovePeer) -> None:
        """Carry an action out. A read may block for as long as its copy takes (`nixl`)."""
        if isinstance(action, StartRead):
            self._read(action)
        elif isinstance(action, StartVerify):
            self._futures[action.read_id] = self._executor.submit(self._sum, action.arrivals)
        elif (peer := self._peers.pop(action.agent, None)) is not None:
            self._transport.remove_peer(peer)

    def poll(self) -> tuple[ReadDone | Verified, ...]:
        """Return what became terminal since the last call."""
        events: list[ReadDone | Verified] = [
            ReadDone(read_id, ReadState.FAILED) for read_id in self._failed
        ]
        self._failed.clear()
        for read_id, handle in tuple(self._handles.items()):
            state = self._transport.poll(handle)
            if state != ReadState.RUNNING:
                del self._handles[read_id]
                self._transport.release(handle)
                events.append(ReadDone(read_id, state))
        for read_id, future in tuple(self._futures.items()):
            if future.done():
                del self._futures[read_id]
                events.append(Verified(read_id, future.result()))
        return tuple(events)

    def _read(self, action: StartRead) -> None:
        peer = self._peers.get(action.agent)
        if peer is None:
            try:
                peer = self._transport.add_peer(action.agent)
            except Malformed:
                self._failed.append(action.read_id)
                return
            self._peers[action.agent] = peer
        items = [
            ReadItem(arrival.landing.address, arrival.remote_address, arrival.length_bytes)
            for arrival in action.arrivals
        ]
        self._handles[action.read_id] = self._transport.start_read(peer, items)

    def _sum(self, arrivals: tuple[Arrival, ...]) -> tuple[int, ...]:
        return tuple(
            self._summed(arrival.landing.view[: arrival.length_bytes]) for arrival in arrivals
        )
