"""The contract of a tier below the host pool.

Ownership. The pool owns slots; a tier borrows them for the length of a job. A slot named in a job
is pinned by the pool from the submit until the job's result has been handed out.

Lifecycle. `submit_*` never blocks: it queues and returns. Every submitted job appears in
`get_finished_jobs` exactly once, whatever happened to it. `drain` waits until all are terminal
(their results still surface); `close` drains, then lets go of everything.

Failure. A tier does not raise for a disk that is full, a file that is corrupt or a peer that is
dead: it answers MISS for the chunks concerned and counts it. Bytes handed over as HIT have been
verified against the checksum stored with them. What cannot finish leaves no trace in the tier.

Threading. The pool calls every method from one thread. A tier may have threads of its own; they
touch slots of their jobs and nothing else of the pool.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..fabric.types import Chunk, ChunkKey, Lookup, Medium, NamespaceId


class JobKind(IntEnum):
    """The two directions."""

    STORE = 0
    LOAD = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One asynchronous transfer between slots of the pool and a tier."""

    job_id: int
    kind: JobKind
    namespace: NamespaceId
    chunks: tuple[Chunk, ...]
    views: tuple[memoryview, ...]
    """The slots' bytes, one view of `length_bytes` per chunk; writable for a load."""
    deadline_s: float
    """On the clock that the tier was given. Past it, what has not begun is answered MISS."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job."""

    job_id: int
    outcomes: tuple[Lookup, ...]
    """HIT (stored, or loaded and verified) or MISS, chunk by chunk."""
    checksums: tuple[int, ...]
    """Of the bytes now in the slots (load) or in the tier (store); 0 for a MISS."""
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierEvent:
    """Chunks that a tier gained or lost by itself."""

    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    removed: bool


@dataclass(frozen=True, slots=True)
class TierStats:
    """Gauges and counts of a tier, read without touching its private state."""

    used_bytes: int
    quota_bytes: int
    chunks: int
    counters: Mapping[str, int]


class Tier(ABC):
    """A place below the host pool. See the module's text for what an implementer guarantees."""

    name: str
    medium: Medium

    @abstractmethod
    def lookup(self, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> Sequence[Lookup]:
        """Answer from memory, in microseconds: HIT, MISS, or PENDING while the tier finds out."""

    @abstractmethod
    def submit_store(self, job: Job) -> None:
        """Queue a copy from slots into the tier. Chunks that it has already are skipped, as HIT."""

    @abstractmethod
    def submit_load(self, job: Job) -> None:
        """Queue a copy from the tier into slots."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of all jobs that became terminal since the last call."""

    @abstractmethod
    def take_events(self) -> Sequence[TierEvent]:
        """Return what was gained and lost since the last call, in order."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until every submitted job is terminal."""

    @abstractmethod
    def close(self) -> None:
        """Drain, then let go of threads, files and connections. Safe to call twice."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return gauges and counts."""

    @abstractmethod
    def check(self) -> None:
        """Raise `Conservation` if the tier's books do not balance."""
