"""Jobs under way, and the order in which threads take them. Pure; the tier guards it with a lock.

Loads go first. A job is handed out in short runs of chunks, so that several threads share a large
one and a deadline is looked at between runs. A job's chunks begin in order, head first.
"""

import math
from collections import deque
from dataclasses import dataclass

from ...fabric.types import Chunk, Lookup
from ..base import Job, JobKind, JobResult
from ..tier_events import RecordId

RUN_CHUNKS_MAX = 8
"""Chunks that a thread takes at once: enough to make the lock's cost vanish beside small chunks."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one chunk."""

    outcome: Lookup
    checksum: int = 0
    moved_bytes: int = 0


MISSED = Done(Lookup.MISS)


class ActiveJob:
    """A job from its submit to its result."""

    def __init__(self, job: Job, now_s: float, deadline_s: float) -> None:
        self.job = job
        self.deadline_s = deadline_s
        self.begun = 0
        """Chunks before this position have been handed to a thread, or decided."""
        self._started_s = now_s
        self._done = [Done(Lookup.PENDING)] * len(job.chunks)
        self._undecided = len(job.chunks)

    @property
    def terminal(self) -> bool:
        """Return whether every chunk is decided."""
        return self._undecided == 0

    def chunk(self, position: int) -> tuple[RecordId, Chunk, memoryview]:
        """Return the name, the description and the slot's bytes of a chunk."""
        chunk = self.job.chunks[position]
        record = RecordId(self.job.namespace, chunk.key)
        return record, chunk, self.job.views[position].cast("B")

    def decide(self, position: int, done: Done) -> None:
        """Decide a chunk; the first word counts."""
        if self._done[position].outcome is Lookup.PENDING:
            self._done[position] = done
            self._undecided -= 1

    def expire(self) -> int:
        """Decide what has not begun as MISS; return how many chunks that were."""
        expired = range(self.begun, len(self.job.chunks))
        for position in expired:
            self.decide(position, MISSED)
        self.begun = len(self.job.chunks)
        return len(expired)

    def result(self, now_s: float) -> JobResult:
        """Return the result of a terminal job."""
        return JobResult(
            self.job.job_id,
            tuple(done.outcome for done in self._done),
            tuple(done.checksum for done in self._done),
            sum(done.moved_bytes for done in self._done),
            now_s - self._started_s,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks of a job for one thread."""

    active: ActiveJob
    positions: range


class JobQueue:
    """Jobs whose chunks have not all begun."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.loads: deque[ActiveJob] = deque()
        """Bounded by the pool: every load pins slots of the region."""
        self.stores: deque[ActiveJob] = deque()
        """Bounded by the tier's `queue_jobs_max`."""
        self._earliest_s = math.inf

    def put(self, active: ActiveJob) -> None:
        """Queue a job behind those of its kind."""
        (self.stores if active.job.kind is JobKind.STORE else self.loads).append(active)
        self._earliest_s = min(self._earliest_s, active.deadline_s)

    def has(self, *, stores: bool) -> bool:
        """Return whether there is work for a reader, or with `stores` for a writer."""
        return bool(self.loads) or (stores and bool(self.stores))

    def take(self) -> Run:
        """Take a run of the first load, or store if no load waits. There must be one."""
        queue = self.loads or self.stores
        active = queue[0]
        left = len(active.job.chunks) - active.begun
        count = min(RUN_CHUNKS_MAX, math.ceil(left / self._threads))
        run = Run(active, range(active.begun, active.begun + count))
        active.begun += count
        if count == left:
            queue.popleft()
        return run

    def expire(self, now_s: float) -> list[tuple[ActiveJob, int]]:
        """Take out jobs past their deadline, with the number of chunks that never began."""
        if now_s <= self._earliest_s:
            return []
        late = [active for active in (*self.loads, *self.stores) if now_s > active.deadline_s]
        self.loads = deque(active for active in self.loads if now_s <= active.deadline_s)
        self.stores = deque(active for active in self.stores if now_s <= active.deadline_s)
        waiting = (*self.loads, *self.stores)
        self._earliest_s = min((active.deadline_s for active in waiting), default=math.inf)
        return [(active, active.expire()) for active in late]
