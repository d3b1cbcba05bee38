"""The reference tier: bytes in a dictionary, under a quota, least recently used out first.

It has no threads: jobs wait in a queue and are carried out when the pool next asks for finished
jobs, or drains. Read it to see what the contract asks; compare other tiers with it.

Ownership: the tier's bytes are copies. Failure: a copy whose checksum no longer matches is dropped
and is a MISS. Threading: everything happens in the caller's thread.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..fabric.checksum import checksum
from ..fabric.clock import Clock
from ..fabric.errors import Closed, Conservation
from ..fabric.types import Chunk, ChunkKey, Lookup, Medium, NamespaceId
from .base import Job, JobKind, JobResult, Tier, TierEvent, TierStats
from .tier_events import RecordId, TierEventLog

COUNTERS = (
    "stored", "store_skipped", "store_failed", "loaded", "load_missed", "corrupt", "evicted",
    "expired",
)  # fmt: skip
"""Chunks, by what became of them. The file tier uses the same names."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A chunk at rest."""

    data: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class _Done:
    """One chunk of a job, done."""

    outcome: Lookup
    checksum: int = 0
    moved_bytes: int = 0


_MISS = _Done(Lookup.MISS)


class MemoryTier(Tier):
    """Chunks as `bytes`, at most `quota_bytes` of them."""

    def __init__(self, quota_bytes: int, clock: Clock, name: str = "memory") -> None:
        self.name = name
        self.medium = Medium.CPU
        self._quota_bytes = quota_bytes
        self._clock = clock
        self._copies: OrderedDict[RecordId, _Copy] = OrderedDict()
        self._used_bytes = 0
        self._queue: list[Job] = []
        """Bounded by the pool: every job pins slots of the region."""
        self._finished: list[JobResult] = []
        self._events = TierEventLog()
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._closed = False

    def lookup(self, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> Sequence[Lookup]:
        """Answer HIT or MISS; never PENDING, because the dictionary knows."""
        return [Lookup.HIT if (namespace, key) in self._copies else Lookup.MISS for key in keys]

    def submit_store(self, job: Job) -> None:
        """Queue it. Raises `Closed`."""
        self._submit(job)

    def submit_load(self, job: Job) -> None:
        """Queue it. Raises `Closed`."""
        self._submit(job)

    def _submit(self, job: Job) -> None:
        if self._closed:
            raise Closed(f"tier {self.name}")
        self._queue.append(job)

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Carry out what waits, and return the results."""
        self.drain()
        finished, self._finished = self._finished, []
        return finished

    def take_events(self) -> Sequence[TierEvent]:
        """Return gains and losses since the last call."""
        return self._events.take()

    def drain(self) -> None:
        """Carry out what waits; the results surface later."""
        queue, self._queue = self._queue, []
        self._finished.extend(self._carry_out(job) for job in queue)

    def close(self) -> None:
        """Drain, then forget all bytes."""
        self.drain()
        self._closed = True
        self._copies.clear()
        self._used_bytes = 0

    def stats(self) -> TierStats:
        """Return gauges and counts."""
        return TierStats(
            self._used_bytes, self._quota_bytes, len(self._copies), dict(self._counters)
        )

    def check(self) -> None:
        """Raise `Conservation` unless used bytes are the sum of the copies and within quota."""
        held = sum(len(copy.data) for copy in self._copies.values())
        if held != self._used_bytes or held > self._quota_bytes:
            raise Conservation(
                f"tier {self.name}", f"held {held}, used {self._used_bytes} of {self._quota_bytes}"
            )

    def _carry_out(self, job: Job) -> JobResult:
        started_s = self._clock.now_s()
        if started_s > job.deadline_s:
            self._counters["expired"] += len(job.chunks)
            done = [_MISS] * len(job.chunks)
        else:
            act = self._store if job.kind is JobKind.STORE else self._load
            done = [
                act(RecordId(job.namespace, chunk.key), chunk, view)
                for chunk, view in zip(job.chunks, job.views, strict=True)
            ]
        return JobResult(
            job.job_id,
            tuple(one.outcome for one in done),
            tuple(one.checksum for one in done),
            sum(one.moved_bytes for one in done),
            self._clock.now_s() - started_s,
        )

    def _store(self, record: RecordId, chunk: Chunk, view: memoryview) -> _Done:
        if record in self._copies:
            self._copies.move_to_end(record)
            self._counters["store_skipped"] += 1
            return _Done(Lookup.HIT, self._copies[record].checksum)
        if view.nbytes > self._quota_bytes:
            self._counters["store_failed"] += 1
            return _MISS
        while self._used_bytes + view.nbytes > self._quota_bytes:
            self._counters["evicted"] += 1
            self._forget(next(iter(self._copies)))
        copy = _Copy(bytes(view), chunk.checksum or checksum(view))
        self._copies[record] = copy
        self._used_bytes += view.nbytes
        self._counters["stored"] += 1
        self._events.gained(record)
        return _Done(Lookup.HIT, copy.checksum, view.nbytes)

    def _load(self, record: RecordId, _: Chunk, view: memoryview) -> _Done:
        if record not in self._copies or len(self._copies[record].data) != view.nbytes:
            self._counters["load_missed"] += 1
            return _MISS
        copy = self._copies[record]
        view.cast("B")[:] = copy.data
        if checksum(view) != copy.checksum:
            self._counters["corrupt"] += 1
            self._forget(record)
            return _MISS
        self._copies.move_to_end(record)
        self._counters["loaded"] += 1
        return _Done(Lookup.HIT, copy.checksum, view.nbytes)

    def _forget(self, record: RecordId) -> None:
        self._used_bytes -= len(self._copies.pop(record).data)
        self._events.lost(record)
