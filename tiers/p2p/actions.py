"""What the pulling side is asked, and what it wants done. Frozen values.

The pool carries actions out in the order in which they come, and answers: `ReserveSlots` with
`reserved`, `StartRead` with `on_read_done`, `StartVerify` with `on_verified`. The others have no
answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...fabric.types import Chunk, ChunkKey, Lookup, NamespaceId, SlotRef
from ...fabric.wire import Message, encode


@dataclass(frozen=True, slots=True)
class Pull:
    """Chunks that a pool wants from one source."""

    pull_id: int
    """Chosen by the pool, never used twice."""
    node: str
    endpoint: str
    namespace: NamespaceId
    keys: tuple[ChunkKey, ...]
    deadline_s: float
    """On the pool's clock: when the answer must be there, whatever it is."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A reserved slot of this pool, for a chunk to land in."""

    ref: SlotRef
    address: int
    view: memoryview = field(compare=False)
    """The slot's bytes, at least as many as the chunk has."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk on its way: from where, to where, and what it must sum up to."""

    index: int
    """Of its key in the pull."""
    landing: Landing
    remote_address: int
    length_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a socket to this source. Afterwards `SendTo` names it."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the socket at once; what it has not sent may be lost."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message to a source. Must not block; what cannot be sent is lost."""

    endpoint: str
    epoch: int
    request: int
    body: Message

    @property
    def frame(self) -> bytes:
        """The message as it travels."""
        return encode(self.epoch, self.request, self.body)


@dataclass(frozen=True, slots=True)
class ReserveSlots:
    """Reserve slots for these chunks. `indices` count in the pull's keys."""

    pull: Pull
    indices: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def keys(self) -> Sequence[ChunkKey]:
        """The chunks' keys, one for each index."""
        return [self.pull.keys[index] for index in self.indices]


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read these chunks from the peer with this agent metadata."""

    read_id: int
    agent: bytes
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class StartVerify:
    """Compute the checksums of these chunks, which are in place now."""

    read_id: int
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """Nothing is or will be read from the peer with this agent metadata."""

    agent: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """A pull is over. Exactly one for each pull."""

    pull: Pull
    outcomes: tuple[Lookup, ...]
    """One per key. HIT: here and verified (in `commits`, or here before). PENDING: the source, or
    another client here, is still writing it. BUSY: no room here or there."""
    commits: tuple[Chunk, ...]
    """Publish these: bytes in place, checksum verified."""
    aborts: tuple[SlotRef, ...]
    """Free these: nothing writes them."""
    doomed: tuple[SlotRef, ...]
    """Keep these aside until an `AbortSlots` names them: a read may still write them."""


@dataclass(frozen=True, slots=True)
class AbortSlots:
    """Free these slots of a pull that is over: nothing writes them any more."""

    pull_id: int
    refs: tuple[SlotRef, ...]


Action = (
    Connect | Disconnect | SendTo | ReserveSlots | StartRead | StartVerify | RemovePeer | Finished
    | AbortSlots
)  # fmt: skip
