"""The words that every room shares. Values only: frozen, comparable, picklable."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType, cast, overload

from .errors import Malformed

ChunkKey = NewType("ChunkKey", bytes)
"""Content address of a chunk in a namespace: block digest, then group index (4 bytes, big-endian).

The digest has 16 or 32 bytes, so a key has 20 or 36. The same bytes as vLLM's offload key.
"""

NamespaceId = NewType("NamespaceId", bytes)
"""16-byte digest of everything that must agree before bytes may be shared (`fabric.namespace`)."""

GROUP_BYTES = 4
KEY_BYTES_MAX = 36
NAMESPACE_BYTES = 16


def make_key(block_digest: bytes, group: int) -> ChunkKey:
    """Join the digest of the last block of a chunk with the index of its cache group."""
    return ChunkKey(block_digest + group.to_bytes(GROUP_BYTES, "big"))


def make_keys(block_digests: Iterable[bytes], group: int) -> list[ChunkKey]:
    """Return `make_key` of each digest."""
    suffix = group.to_bytes(GROUP_BYTES, "big")
    return cast("list[ChunkKey]", [digest + suffix for digest in block_digests])


class KeyBatch(Sequence[ChunkKey]):
    """Keys of one cache group, as `make_key` makes them, whose bytes lie in one piece.

    A prompt has thousands of chunks and a scheduler's loop waits for their lookup: joining the
    digests takes a tenth of the time of making the keys one by one. They are made when looked at.
    """

    __slots__ = ("group", "joined", "key_bytes")

    def __init__(self, block_digests: Sequence[bytes], group: int) -> None:
        """Raise `Malformed` if the digests are not all equally long."""
        count = len(block_digests)
        self.group = group
        self.key_bytes = len(block_digests[0]) + GROUP_BYTES if count else GROUP_BYTES
        suffix = group.to_bytes(GROUP_BYTES, "big")
        self.joined = suffix.join(block_digests) + suffix if count else b""
        if len(self.joined) != count * self.key_bytes:
            raise Malformed("block digests", "they are not all equally long")

    def __len__(self) -> int:
        return len(self.joined) // self.key_bytes

    @overload
    def __getitem__(self, index: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ChunkKey]: ...
    def __getitem__(self, index: int | slice) -> ChunkKey | Sequence[ChunkKey]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        begin = range(len(self))[index] * self.key_bytes
        return ChunkKey(self.joined[begin : begin + self.key_bytes])

    def __iter__(self) -> Iterator[ChunkKey]:
        for begin in range(0, len(self.joined), self.key_bytes):
            yield ChunkKey(self.joined[begin : begin + self.key_bytes])


def key_digest(key: ChunkKey) -> bytes:
    """Return the block digest inside a key."""
    return key[:-GROUP_BYTES]


def key_group(key: ChunkKey) -> int:
    """Return the cache group inside a key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def key_low64(key: ChunkKey) -> int:
    """Return the low 64 bits of the block digest, as vLLM publishes them in its events."""
    return int.from_bytes(key[-GROUP_BYTES - 8 : -GROUP_BYTES], "big")


class Lookup(IntEnum):
    """What a holder answers when asked for a chunk."""

    MISS = 0
    HIT = 1
    PENDING = 2
    """It will be readable: somebody is writing it, or it is on its way from a tier or a peer."""
    BUSY = 3
    """The holder has it or could fetch it, and has no room to do so now. To the engine a miss."""


class Reserved(IntEnum):
    """What a pool answers to a reservation, chunk by chunk."""

    GRANTED = 0
    PRESENT = 1
    """The chunk is already here and readable: nothing to write."""
    PENDING = 2
    """Another client is writing the same chunk."""
    BUSY = 3
    """No slot is free and none can be evicted. The whole batch is refused."""


class Committed(IntEnum):
    """What a pool answers to a commit, chunk by chunk."""

    READY = 0
    LOST = 1
    """The lease had ended; the slot is quarantined or gone, and the chunk was not published."""


class Released(IntEnum):
    """What a pool answers to a release: whether the pin held until now."""

    HELD = 0
    LOST = 1
    """The pin had expired. What was read since then must be thrown away or verified."""


class SlotState(IntEnum):
    """The state word of a slot record. Numbers are part of the control file's format."""

    FREE = 0
    WRITING = 1
    READY = 2
    QUARANTINED = 3
    """The owner went silent while it might still write: neither free nor readable."""


class Medium(IntEnum):
    """Where a chunk lies. `name` is what events carry, as in vLLM."""

    GPU = 0
    CPU = 1
    STORAGE = 2


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot and the generation that makes the reference unique over the life of the pool."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk in a slot: what a transfer needs to know of it."""

    key: ChunkKey
    slot: SlotRef
    length_bytes: int
    checksum: int
    """Of the bytes in the slot (`fabric.checksum`); 0 while they are still to come."""


ANY_NODE = ""
"""Whoever answers at an endpoint: routers of other projects name a host and a port and no node."""


@dataclass(frozen=True, slots=True)
class SourceRange:
    """From whom to pull a run of a request's chunks."""

    node: str
    """Its name, which must be the one that answers; `ANY_NODE` if only the endpoint is known."""
    endpoint: str
    start: int
    count: int
