"""What the scheduler's half of the connector tells the worker's, and what comes back. Values only.

A run names neighbouring chunks of one cache group by their digests and the engine's blocks. It is
flat lists and no object for each chunk, because a long prompt has thousands and they are made in
the scheduler's loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....fabric.types import ChunkKey, make_keys

NULL_BLOCK = 0
"""The engine's block that holds nothing. A load writes into it what it must not write elsewhere."""


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks `first`, `first + 1`, ... of a request in one of the engine's cache groups."""

    engine_group: int
    first: int
    digests: Sequence[bytes]
    """Of each chunk's last block."""
    block_ids: Sequence[int]
    """Of all chunks' blocks, chunk by chunk, `blocks_per_chunk` each."""

    def keys(self, index: int) -> list[ChunkKey]:
        """Return the chunks' keys under a cache group index of the fabric."""
        return make_keys(self.digests, index)

    def blocks_of(self, chunk: int) -> Sequence[int]:
        """Return the blocks of the chunk at this place in the run."""
        each = len(self.block_ids) // len(self.digests)
        return self.block_ids[chunk * each : (chunk + 1) * each]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy these blocks into the pool. One job for the chunks that a step completed."""

    job: int
    runs: tuple[ChunkRun, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill a request's blocks from the pool."""

    request_id: str
    runs: tuple[ChunkRun, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the worker does around one step of the engine."""

    reset: int
    """How often the cache was reset. Jobs of former resets are over."""
    flush: tuple[int, ...] = ()
    """Save jobs whose blocks this step overwrites."""
    saves: tuple[SaveJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()


@dataclass(slots=True)
class WorkerReport:
    """What one worker has done since its last report."""

    saved: list[int] = field(default_factory=list[int])
    """Save jobs that are over, whatever became of them: their blocks are not read any more."""
    failed_loads: list[str] = field(default_factory=list[str])
    """Requests whose load did not bring everything."""
    silent: bool = False
    """The pool did not answer."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (self.saved or self.failed_loads or self.silent)

    def add(self, other: "WorkerReport") -> None:
        """Take in another worker's report."""
        self.saved += other.saved
        self.failed_loads += other.failed_loads
        self.silent |= other.silent
