"""What the directory answers: frozen values."""

from dataclasses import dataclass

from ...fabric.types import Chunk, ChunkKey, Lookup, NamespaceId, Reserved, SlotRef

NO_SLOT = SlotRef(0, 0)
"""Where there is none to name. No slot ever has generation 0."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What became of one chunk of a reservation."""

    status: Reserved
    slot: SlotRef
    """To be written and committed where GRANTED, else `NO_SLOT`."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What became of one chunk that was to be pinned."""

    status: Lookup
    chunk: Chunk
    """Where HIT; otherwise it has the key, `NO_SLOT`, and no length or checksum."""


@dataclass(frozen=True, slots=True)
class Change:
    """A chunk became readable (`stored`) or stopped being so."""

    namespace: NamespaceId
    key: ChunkKey
    stored: bool


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was found in the records of an existing table, in slots."""

    ready: int
    quarantined: int
    """Owned by a process that is alive and might still write them."""
    freed: int
    """Being written, or quarantined, by a process that is gone."""
    dropped: int
    """Records that could not be believed. Those that a live process claims are quarantined too."""


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """Gauges, in slots, then counts since the directory was made."""

    slots: int
    free: int
    writing: int
    ready: int
    quarantined: int
    condemned: int
    """No longer found by their key, and free as soon as the last pin is released."""
    pinned: int
    """Of `ready` and `condemned`, those with a pin."""
    owners: int
    stored: int
    evictions: int
    dropped: int
    """Chunks whose bytes were found corrupt."""
    retired: int
    busy: int
    """Chunks refused to a reservation."""
    hits: int
    misses: int
    lost: int
    """Commits and releases that came after the end of their lease."""
    lapses: int
    """Leases that ended without a sign of their owner."""
    crowded: int
    """Chunks that the key index had no room for: kept, but not seen by a lookup without a call."""
