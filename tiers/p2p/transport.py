"""The contract of a transport: one-sided reads of another node's host memory.

Ownership. The caller owns both memories. From `start_read` until `poll` has said DONE or FAILED,
the transport may write the local side: the caller must not reuse it before. No deadline changes
that; a caller that has lost patience keeps the memory aside and goes on polling. The remote side is
the source's promise (its lease); if the promise breaks, the bytes are wrong and no error says so,
which is why the reader verifies a checksum.

Lifecycle. `register` own segments, tell `metadata` to peers, `add_peer` with theirs, read, and
`release` each handle once it is terminal. A peer is removed only when no read from it runs; it may
be added again. Handles are never reused. `close` ends everything that is terminal and is safe to
call twice; what is still running then belongs to the end of the process.

Failure. A peer that is dead, unreachable or has forgotten its memory makes reads FAILED, at the
start or later, and never an exception. `add_peer` raises `Malformed` for metadata that is not a
peer's. A peer that is only silent may leave a read RUNNING for as long as it stays so.

Threading. One thread calls every method. Nothing moves by itself: whoever has reads running, or has
granted reads to others, calls `progress` (or `poll`) every millisecond or so.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ReadState(IntEnum):
    """Where a read stands. The last two are terminal."""

    RUNNING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of host memory that peers may read."""

    address: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One run of bytes to copy from the peer's memory to ours."""

    local_address: int
    remote_address: int
    length_bytes: int


class Transport(ABC):
    """What moves bytes between pools. See the module's text for what an implementer guarantees."""

    @abstractmethod
    def metadata(self) -> bytes:
        """Return what a peer must know to read what is registered by now."""

    @abstractmethod
    def register(self, segments: Sequence[Segment]) -> None:
        """Let these segments be read by peers and be written by own reads."""

    @abstractmethod
    def add_peer(self, agent: bytes) -> str:
        """Learn a peer from its metadata; return its name. Raises `Malformed`."""

    @abstractmethod
    def remove_peer(self, peer: str) -> None:
        """Forget a peer from which nothing is being read. Unknown peers are forgotten already."""

    @abstractmethod
    def start_read(self, peer: str, items: Sequence[ReadItem]) -> int:
        """Begin a read of all items; return its handle. It may be terminal already."""

    @abstractmethod
    def poll(self, handle: int) -> ReadState:
        """Return where a read stands, having moved it on."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Let go of a terminal read. Raises `Conservation` if it still runs."""

    @abstractmethod
    def progress(self) -> None:
        """Serve peers that read from here, and move own reads on."""

    @abstractmethod
    def close(self) -> None:
        """Let go of peers and registrations."""
