"""One-sided reads on virtual time: bytes copied without the source's code taking part.

Ownership. The source publishes a region under its name and epoch and must keep what is being read
pinned; nothing here does that for it. The reader lends a target view until the read is terminal.

Lifecycle. `read` returns a handle that is polled. Bytes are copied piece by piece at different
virtual times, from whatever the region then holds: a slot that is reused meanwhile gives torn
bytes, which only a checksum can catch. A read goes on while its source is paused (a NIC needs no
CPU) and while its reader is paused.

Failure. A read fails, or hangs: it stays RUNNING and copies nothing more until `calm`, which lets
it fail. When the source's epoch ends, what is under way fails or hangs. `cancel` asks; a read that
is copying may land up to `CANCEL_S_MAX` later, and is terminal only then. The reader must not reuse
the target before. Whatever the outcome, the target's bytes are undefined unless it is DONE, and
unverified then.
"""

from collections.abc import Callable
from enum import IntEnum
from random import Random

from .knobs import RemoteMemoryKnobs
from .process import Process
from .world import World

CANCEL_S_MAX = 0.1
"""How long after `cancel` a device may still write: the rest of the pieces in its queue."""


class ReadState(IntEnum):
    """Where a one-sided read is. DONE, FAILED and CANCELLED are terminal."""

    RUNNING = 0
    DONE = 1
    FAILED = 2
    CANCELLED = 3


class RemoteRead:
    """The handle of one read. Poll `state`."""

    def __init__(
        self,
        owner: "RemoteMemory",
        reader: Process,
        source: "_Published | None",
        offset: int,
        target: memoryview,
    ) -> None:
        self.state = ReadState.RUNNING
        self.bytes_moved = 0
        self.done: Callable[[], None] | None = None
        """Called once, in the reader, when the read becomes terminal."""
        self._owner, self._reader, self._source = owner, reader, source
        self._reader_epoch = reader.epoch
        self._offset, self._target = offset, target
        self._cancelled = False
        self._hung = False

    def cancel(self) -> None:
        """Ask to stop. The read becomes terminal within `CANCEL_S_MAX`."""
        if self.state is not ReadState.RUNNING or self._cancelled:
            return
        self._cancelled = True
        delay_s = self._owner.random.uniform(0.0, CANCEL_S_MAX)
        self._reader.dma(delay_s, lambda: self._end(ReadState.CANCELLED), "read cancelled")

    def begin(self) -> None:
        """Plan the first piece; only `RemoteMemory.read` calls this."""
        knobs = self._owner.knobs
        delay_s = knobs.delay_s * self._owner.random.uniform(0.5, 1.5)
        self._reader.dma(delay_s, self._piece, "read piece")

    def _piece(self) -> None:
        if self.state is not ReadState.RUNNING or self._hung:
            return
        random, knobs, source = self._owner.random, self._owner.knobs, self._source
        if source is None or source.process.is_gone(source.epoch):
            self._fault(hangs=random.random() < knobs.dead_hang_share)
            return
        piece_bytes = min(knobs.piece_bytes, self._target.nbytes - self.bytes_moved)
        start = self._offset + self.bytes_moved
        self._target[self.bytes_moved : self.bytes_moved + piece_bytes] = source.region[
            start : start + piece_bytes
        ]
        self.bytes_moved += piece_bytes
        if self.bytes_moved == self._target.nbytes:
            self._end(ReadState.DONE)
            return
        gap_s = knobs.piece_gap_s * random.uniform(0.5, 1.5)
        self._reader.dma(gap_s, self._piece, "read piece")

    def fault(self, random: Random, knobs: RemoteMemoryKnobs) -> None:
        """Draw whether this read fails or hangs; only `RemoteMemory.read` calls this."""
        draw = random.random()
        if draw < knobs.fail_share:
            self._reader.dma(random.expovariate(1 / knobs.delay_s), self._fail, "read fails")
        elif draw < knobs.fail_share + knobs.hang_share:
            self._reader.dma(random.expovariate(1 / knobs.delay_s), self._hang, "read hangs")

    def give_up(self) -> None:
        """Let a hung read fail, as a connection does whose keep-alive ran out."""
        if not self._reader.is_gone(self._reader_epoch):
            self._reader.at(0.0, lambda: self._end(ReadState.FAILED), "read gives up")

    def _fail(self) -> None:
        self._fault(hangs=False)

    def _hang(self) -> None:
        self._fault(hangs=True)

    def _fault(self, *, hangs: bool) -> None:
        if self.state is not ReadState.RUNNING:
            return
        self._owner.faults += 1
        if hangs:
            self._hung = True
            self._owner.hung.append(self)
        else:
            self._end(ReadState.FAILED)

    def _end(self, state: ReadState) -> None:
        if self.state is not ReadState.RUNNING:
            return
        self.state = state
        if self.done is not None:
            self._reader.at(0.0, self.done, "read ended")


class _Published:
    __slots__ = ("epoch", "process", "region")

    def __init__(self, process: Process, region: memoryview) -> None:
        self.process, self.epoch, self.region = process, process.epoch, region


class RemoteMemory:
    """The transport that all processes of a world share."""

    def __init__(self, world: World, knobs: RemoteMemoryKnobs) -> None:
        self.knobs = knobs
        self.random = world.fork("remote memory")
        self.reads = 0
        self.faults = 0
        self.hung: list[RemoteRead] = []
        self._world = world
        self._published: dict[tuple[str, int], _Published] = {}

    def publish(self, process: Process, region: memoryview) -> None:
        """Let others read `region` of this process's present epoch."""
        self._published[process.name, process.epoch] = _Published(process, region)

    def read(
        self, reader: Process, source: str, epoch: int, offset: int, target: memoryview
    ) -> RemoteRead:
        """Begin to copy `target.nbytes` bytes at `offset` of the source's region.

        A source or epoch that nobody published behaves as one that died.
        """
        self.reads += 1
        read = RemoteRead(self, reader, self._published.get((source, epoch)), offset, target)
        read.begin()
        read.fault(self.random, self.knobs)
        return read

    def calm(self) -> None:
        """Break no further reads, and let those that hang fail."""
        self.knobs = RemoteMemoryKnobs(piece_bytes=self.knobs.piece_bytes)
        self._world.note("memory", f"{len(self.hung)} hung reads give up")
        for read in self.hung:
            read.give_up()
        self.hung.clear()
