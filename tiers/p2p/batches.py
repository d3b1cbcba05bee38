"""Reads under way: what is read in one batch, whose turn is next, and which reads are doomed.

Part of `consumer`. A slot under a running read belongs to that read until the transport has called
it terminal, whatever becomes of the pull.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from ...fabric.errors import Conservation
from .actions import Arrival
from .records import PullRecord, ReadRecord, ReadStage, SourceRecord

READ_BATCH_BYTES_MAX = 32 << 20
"""One read. A copy through the kernel blocks the caller for 6 ms at the 5.7 GB/s measured."""
READ_BATCH_CHUNKS_MAX = 256
"""The same for small chunks: describing more would take longer than copying them."""
READS_PER_SOURCE_MAX = 2
"""One on the wire and one ready behind it, doomed ones included."""
READS_MAX = 8
"""Reads of pulls that are not over: what the machine's links can keep busy."""


class Batches:
    """The reads of all pulls."""

    def __init__(self) -> None:
        self._reads: dict[int, ReadRecord] = {}
        """Running, doomed or verifying."""
        self._turns: deque[PullRecord] = deque()
        """Pulls that have chunks to read."""
        self._read_id = 0

    def enqueue(self, record: PullRecord) -> None:
        """Let a pull have its turns."""
        self._turns.append(record)

    def start(self, now_s: float) -> Iterator[ReadRecord | PullRecord]:
        """Start the reads that may start, one batch per pull in turn.

        Yields each read, and each pull that has nothing left to read. A pull whose lease is over
        reads no further.
        """
        running = sum(read.stage == ReadStage.RUNNING for read in self._reads.values())
        blocked = 0
        while blocked < len(self._turns):
            record = self._turns.popleft()
            if now_s >= record.lease_ends_s:
                record.to_read.clear()
            if not record.to_read:
                yield record
                continue
            self._turns.append(record)
            if running < READS_MAX and len(record.source.reads) < READS_PER_SOURCE_MAX:
                running, blocked = running + 1, 0
                yield self._start(record, now_s)
            else:
                blocked += 1

    def terminal(self, read_id: int) -> ReadRecord | None:
        """Return the running or doomed read of this id, which its source now reads no more."""
        read = self._reads.get(read_id)
        if read is None or read.stage == ReadStage.VERIFYING:
            return None
        del read.owner.source.reads[read_id]
        return read

    def verified(self, read_id: int) -> ReadRecord | None:
        """Return the read of this id if it was being verified; it is over."""
        read = self._reads.get(read_id)
        if read is None or read.stage != ReadStage.VERIFYING:
            return None
        self.drop(read)
        return read

    def drop(self, read: ReadRecord) -> None:
        """Forget a read that is terminal."""
        del self._reads[read.read_id]
        read.owner.reads.pop(read.read_id, None)

    def end(self, record: PullRecord) -> list[Arrival]:
        """Take a pull out; return the chunks whose slots its reads may still write."""
        if record in self._turns:
            self._turns.remove(record)
        doomed: list[Arrival] = []
        for read in tuple(record.reads.values()):
            if read.stage == ReadStage.RUNNING:
                read.stage = ReadStage.DOOMED
                doomed += read.arrivals
            else:
                self.drop(read)
        return doomed

    def agents(self) -> set[bytes]:
        """Return the agents that are being read from."""
        return {read.agent for read in self._reads.values() if read.stage != ReadStage.VERIFYING}

    def doomed_chunks(self) -> int:
        """Return how many slots are kept aside."""
        doomed = (read for read in self._reads.values() if read.stage == ReadStage.DOOMED)
        return sum(len(read.arrivals) for read in doomed)

    def check(self, sources: Iterable[SourceRecord]) -> None:
        """Raise `Conservation` if reads and their sources disagree."""
        ours = {
            read_id for read_id, read in self._reads.items() if read.stage != ReadStage.VERIFYING
        }
        theirs = {read_id for source in sources for read_id in source.reads}
        if ours != theirs:
            raise Conservation("running reads", f"{sorted(ours)}, at sources {sorted(theirs)}")

    def _start(self, record: PullRecord, now_s: float) -> ReadRecord:
        source = record.source
        if source.welcome is None:
            raise Conservation("reads", f"{source.endpoint} has not said how it can be read")
        batch: list[Arrival] = []
        size_bytes = 0
        while record.to_read and len(batch) < READ_BATCH_CHUNKS_MAX:
            size_bytes += record.to_read[0].length_bytes
            if batch and size_bytes > READ_BATCH_BYTES_MAX:
                break
            batch.append(record.to_read.popleft())
        self._read_id += 1
        read = ReadRecord(self._read_id, record, source.welcome.agent, tuple(batch), now_s)
        self._reads[read.read_id] = record.reads[read.read_id] = read
        source.reads[read.read_id] = read
        return read
