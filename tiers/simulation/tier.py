"""A tier over a simulated disk: the contract of `tiers.base` on virtual time.

It does what a tier of files does. A record is a file: 8 bytes of checksum (little-endian), then the
chunk; its name is the namespace, the key in hex, and the chunk's length. A store is written beside
and renamed, so that a writer killed in the middle leaves a file that the next incarnation removes.
The checksum stored is the one that the job names, and a load is a HIT only if the bytes now in the
slot have it. Records survive a kill; the index is rebuilt from the names.

Up to `CHANNELS` jobs run at once, in order of submission; a job's chunks run one after another.
Beyond `QUEUE_JOBS_MAX` waiting jobs a store is dropped (all MISS) and a load is not. A chunk that
is corrupt, torn or gone is removed, with an event. The quota is kept by evicting the least recently
used records that no job reads.

`drain` takes no virtual time: every job runs to its end at once, without the disk's delays.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...fabric.checksum import checksum
from ...fabric.clock import Clock
from ...fabric.errors import Closed, Conservation
from ...fabric.types import Chunk, ChunkKey, Lookup, Medium, NamespaceId
from ..base import Job, JobKind, JobResult, Tier, TierEvent, TierStats
from .disk import Disk, DiskOutcome, DiskTransfer
from .world import Scheduler

HEADER_BYTES = 8
QUEUE_JOBS_MAX = 64
CHANNELS = 2
"""As many as a file tier has readers: enough that two jobs overtake each other."""
BESIDE = "beside-"
"""Begins the name of a file that is not a record yet."""

_Id = tuple[NamespaceId, ChunkKey]


@dataclass(slots=True)
class _Record:
    file: str
    length_bytes: int
    readers: int = 0


@dataclass(slots=True)
class _Running:
    """A job with the outcomes that it has so far."""

    job: Job
    began_s: float
    outcomes: list[Lookup] = field(default_factory=list[Lookup])
    checksums: list[int] = field(default_factory=list[int])
    bytes_moved: int = 0
    transfer: DiskTransfer | None = None
    """What the disk is doing for it."""


class SimTier(Tier):
    """See the module's text. `scheduler` is the process that it lives in."""

    medium = Medium.STORAGE

    def __init__(
        self,
        disk: Disk,
        scheduler: Scheduler,
        clock: Clock,
        *,
        name: str = "sim",
        quota_bytes: int = 1 << 30,
    ) -> None:
        self.name = name
        self._disk, self._scheduler, self._clock = disk, scheduler, clock
        self._quota_bytes = quota_bytes
        self._records: OrderedDict[_Id, _Record] = OrderedDict()
        self._writing: dict[_Id, int] = {}
        self._used_bytes = 0
        self._queue: deque[_Running] = deque()
        self._running: dict[int, _Running] = {}
        self._finished: list[JobResult] = []
        self._events: list[TierEvent] = []
        self._draining = self._closed = False
        self._counters: dict[str, int] = dict.fromkeys(
            ("submitted", "finished", "dropped", "corrupt", "errors", "evicted", "late"), 0
        )
        self._recover()

    def _recover(self) -> None:
        """Rebuild the index from the files' names; remove what a dead writer left beside."""
        for file in self._disk.names():
            if file.startswith(BESIDE):
                self._disk.remove(file)
                continue
            namespace, key, length = file.split("-")
            record_id = NamespaceId(bytes.fromhex(namespace)), ChunkKey(bytes.fromhex(key))
            self._records[record_id] = _Record(file, int(length))
            self._used_bytes += int(length)
            self._tell(record_id, removed=False)

    def lookup(self, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> Sequence[Lookup]:
        """HIT for a record, PENDING while it is being written, else MISS."""
        answers: list[Lookup] = []
        for key in keys:
            if (namespace, key) in self._records:
                answers.append(Lookup.HIT)
            elif (namespace, key) in self._writing:
                answers.append(Lookup.PENDING)
            else:
                answers.append(Lookup.MISS)
        return answers

    def submit_store(self, job: Job) -> None:
        """Queue a store; with the queue full it is answered MISS at once."""
        self._submit(job, droppable=True)

    def submit_load(self, job: Job) -> None:
        """Queue a load."""
        self._submit(job, droppable=False)

    def _submit(self, job: Job, *, droppable: bool) -> None:
        if self._closed:
            raise Closed(f"tier {self.name}")
        running = _Running(job, self._clock.now_s())
        self._counters["submitted"] += 1
        if droppable and len(self._queue) >= QUEUE_JOBS_MAX:
            self._counters["dropped"] += 1
            self._miss_rest(running)
            self._end(running)
            return
        self._queue.append(running)
        self._pump()

    def _pump(self) -> None:
        while self._queue and len(self._running) < CHANNELS:
            running = self._queue.popleft()
            self._running[running.job.job_id] = running
            self._next_later(running)

    def _next_later(self, running: _Running) -> None:
        if not self._draining:
            self._scheduler.at(0.0, lambda: self._next(running), f"{self.name} next")

    def _next(self, running: _Running) -> None:
        """Begin the next chunk of a job, or end the job."""
        job = running.job
        if self._running.get(job.job_id) is not running or running.transfer is not None:
            return
        done = len(running.outcomes)
        if done < len(job.chunks) and self._clock.now_s() > job.deadline_s:
            self._counters["late"] += 1
            self._miss_rest(running)
            done = len(job.chunks)
        if done == len(job.chunks):
            del self._running[job.job_id]
            self._end(running)
            self._pump()
            return
        if job.kind is JobKind.STORE:
            self._store(running, job.chunks[done], job.views[done])
        else:
            self._load(running, job.chunks[done], job.views[done])

    def _answer(self, running: _Running, outcome: Lookup, digest: int, moved: int) -> None:
        running.outcomes.append(outcome)
        running.checksums.append(digest)
        running.bytes_moved += moved
        running.transfer = None
        self._next_later(running)

    def _miss_rest(self, running: _Running) -> None:
        rest = len(running.job.chunks) - len(running.outcomes)
        running.outcomes += [Lookup.MISS] * rest
        running.checksums += [0] * rest

    def _end(self, running: _Running) -> None:
        self._counters["finished"] += 1
        self._finished.append(
            JobResult(
                running.job.job_id,
                tuple(running.outcomes),
                tuple(running.checksums),
                running.bytes_moved,
                self._clock.now_s() - running.began_s,
            )
        )

    def _store(self, running: _Running, chunk: Chunk, view: memoryview) -> None:
        record_id = running.job.namespace, chunk.key
        if record_id in self._records:
            self._records.move_to_end(record_id)
            self._answer(running, Lookup.HIT, chunk.checksum, 0)
            return
        if record_id in self._writing or not self._make_room(view.nbytes):
            self._answer(running, Lookup.MISS, 0, 0)
            return
        self._writing[record_id] = view.nbytes
        self._used_bytes += view.nbytes
        file = f"{record_id[0].hex()}-{chunk.key.hex()}-{view.nbytes}"
        header = chunk.checksum.to_bytes(HEADER_BYTES, "little")

        def written(outcome: DiskOutcome) -> None:
            del self._writing[record_id]
            if outcome is not DiskOutcome.DONE:
                self._disk.remove(BESIDE + file)
                self._used_bytes -= view.nbytes
                self._counters["errors"] += 1
                self._answer(running, Lookup.MISS, 0, 0)
                return
            self._disk.rename(BESIDE + file, file)
            self._records[record_id] = _Record(file, view.nbytes)
            self._tell(record_id, removed=False)
            self._answer(running, Lookup.HIT, chunk.checksum, view.nbytes)

        running.transfer = self._disk.write(BESIDE + file, header, view, self._scheduler, written)

    def _load(self, running: _Running, chunk: Chunk, view: memoryview) -> None:
        record_id = running.job.namespace, chunk.key
        record = self._records.get(record_id)
        if record is None or record.length_bytes != view.nbytes:
            self._answer(running, Lookup.MISS, 0, 0)
            return
        self._records.move_to_end(record_id)
        record.readers += 1
        header = memoryview(bytearray(HEADER_BYTES))

        def read(outcome: DiskOutcome) -> None:
            record.readers -= 1
            digest = int.from_bytes(header, "little")
            if outcome is DiskOutcome.DONE and checksum(view) == digest:
                self._answer(running, Lookup.HIT, digest, view.nbytes)
                return
            if outcome is DiskOutcome.EIO:
                self._counters["errors"] += 1
            else:
                self._counters["corrupt"] += 1
                self._forget(record_id, record)
            self._answer(running, Lookup.MISS, 0, 0)

        def read_header(outcome: DiskOutcome) -> None:
            if outcome is not DiskOutcome.DONE:
                read(outcome)
                return
            running.transfer = self._disk.read(
                record.file, HEADER_BYTES, view, self._scheduler, read
            )

        running.transfer = self._disk.read(record.file, 0, header, self._scheduler, read_header)

    def _make_room(self, size_bytes: int) -> bool:
        """Evict what a new record needs; nothing, if that would not be enough."""
        victims: list[_Id] = []
        excess_bytes = self._used_bytes + size_bytes - self._quota_bytes
        for record_id, record in self._records.items():
            if excess_bytes <= 0:
                break
            if record.readers == 0:
                victims.append(record_id)
                excess_bytes -= record.length_bytes
        if excess_bytes > 0:
            return False
        for record_id in victims:
            self._counters["evicted"] += 1
            self._forget(record_id, self._records[record_id])
        return True

    def _forget(self, record_id: _Id, record: _Record) -> None:
        if self._records.get(record_id) is record:
            del self._records[record_id]
            self._used_bytes -= record.length_bytes
            self._disk.remove(record.file)
            self._tell(record_id, removed=True)

    def _tell(self, record_id: _Id, *, removed: bool) -> None:
        self._events.append(TierEvent(record_id[0], (record_id[1],), removed))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_events(self) -> Sequence[TierEvent]:
        """Return gains and losses since the last call; a new incarnation begins with all it has."""
        events, self._events = self._events, []
        return events

    def drain(self) -> None:
        """Run every job to its end, in no virtual time."""
        self._draining = True
        while self._running or self._queue:
            self._pump()
            for running in tuple(self._running.values()):
                if running.transfer is None:
                    self._next(running)
                else:
                    running.transfer.hurry()
        self._draining = False

    def close(self) -> None:
        """Drain; later jobs are refused."""
        self.drain()
        self._closed = True

    def stats(self) -> TierStats:
        """Return gauges and counts."""
        return TierStats(
            self._used_bytes, self._quota_bytes, len(self._records), dict(self._counters)
        )

    def check(self) -> None:
        """Raise `Conservation` if bytes or jobs are unaccounted for."""
        held = sum(record.length_bytes for record in self._records.values())
        coming = sum(self._writing.values())
        if held + coming != self._used_bytes or self._used_bytes > self._quota_bytes:
            raise Conservation(
                f"tier {self.name}",
                f"records {held} + writing {coming} bytes, used {self._used_bytes} of "
                f"{self._quota_bytes}",
            )
        open_jobs = len(self._queue) + len(self._running)
        if self._counters["submitted"] != self._counters["finished"] + open_jobs:
            raise Conservation(f"tier {self.name}", f"{open_jobs} jobs open, {self._counters}")
