"""What a tier gained and lost since it was last asked, for `Tier.take_events`.

Every gain (a store, a chunk found at start or at a load) and every loss (eviction, corruption, a
file that vanished) is logged when it happens, so whoever replays the events knows the contents. Of
several changes to one chunk between two calls only the last is told, at its place in the order.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..fabric.types import ChunkKey, NamespaceId
from .base import TierEvent

EVENT_CHUNKS_MAX = 1 << 18
"""Chunks remembered between two calls; a pool asks several times a second and a disk stores a few
thousand chunks in one, so more than this means that nobody asks. The oldest are then dropped."""


class RecordId(NamedTuple):
    """A chunk's name in a tier. A plain tuple, because it is hashed for every key of a lookup."""

    namespace: NamespaceId
    key: ChunkKey


class TierEventLog:
    """The log. Not thread safe: its tier guards it."""

    def __init__(self, chunks_max: int = EVENT_CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._removed: dict[RecordId, bool] = {}
        self.dropped = 0
        """Changes that nobody took in time."""

    def gained(self, record: RecordId) -> None:
        """Log that the tier has the chunk from now on."""
        self._note(record, removed=False)

    def lost(self, record: RecordId) -> None:
        """Log that the tier does not have the chunk any more."""
        self._note(record, removed=True)

    def _note(self, record: RecordId, *, removed: bool) -> None:
        self._removed.pop(record, None)
        self._removed[record] = removed
        if len(self._removed) > self._chunks_max:
            del self._removed[next(iter(self._removed))]
            self.dropped += 1

    def take(self) -> Sequence[TierEvent]:
        """Return the changes in order, neighbours of one kind in one event, and forget them."""
        events: list[TierEvent] = []
        keys: list[ChunkKey] = []
        kind = (NamespaceId(b""), False)
        for record, removed in self._removed.items():
            if keys and kind != (record.namespace, removed):
                events.append(TierEvent(kind[0], tuple(keys), kind[1]))
                keys = []
            kind = (record.namespace, removed)
            keys.append(record.key)
        if keys:
            events.append(TierEvent(kind[0], tuple(keys), kind[1]))
        self._removed.clear()
        return events
