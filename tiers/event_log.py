"""A pool's event stream: what it says, numbers, remembers and repeats. Pure; the pool has sockets.

Ownership. The log owns its buffer and nothing else; the manifest stays the pool's. Lifecycle: one
log per epoch of a pool; a restarted pool makes a new one, with the next epoch and from number 0,
and announces what it adopted, for readers that know no snapshots; the others see the new epoch and
ask for one.
Failure: none of its own; bounds drop the oldest batches. Threading: one thread.

A chunk is announced once for each medium that has it, and removed once. If two tiers of one medium
have it, it is announced twice and stands twice in the snapshot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..fabric.clock import Clock
from ..fabric.errors import ConfigError
from ..fabric.events import (
    HASHES_MAX,
    Event,
    EventBatch,
    Frames,
    Snapshot,
    SnapshotSection,
    chunks_removed,
    chunks_stored,
    encode_batch,
    encode_snapshot,
    format_topic,
)
from ..fabric.replay_log import BUFFER_BYTES_MAX, ReplayLog
from ..fabric.types import ChunkKey, Medium, key_group, key_low64

BATCH_HASHES_MAX = HASHES_MAX
"""Chunks in one batch, so that a batch stays under a megabyte and every event under its bound."""


@dataclass(frozen=True, slots=True)
class Change:
    """One chunk that a medium gained or lost. `chunk_tokens` is that of its group."""

    key: ChunkKey
    medium: Medium
    removed: bool
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Resident:
    """One line of a pool's manifest: a chunk and a medium that has it."""

    key: ChunkKey
    medium: Medium
    chunk_tokens: int


class EventLog:
    """The publisher's side of one pool."""

    def __init__(
        self,
        node: str,
        epoch: int,
        buffer_batches: int,
        heartbeat_s: float,
        clock: Clock,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
    ) -> None:
        """Start numbering at 0. Raises `Malformed` for a node name that a topic cannot hold."""
        if buffer_batches < 1 or heartbeat_s <= 0:
            raise ConfigError(
                "events", f"{buffer_batches=} {heartbeat_s=}", "Both must be above 0."
            )
        self.node = node
        self.epoch = epoch
        self.topic = format_topic(node, epoch)
        self._log = ReplayLog(self.topic, buffer_batches, buffer_bytes_max)
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._spoke_s = clock.now_s()

    @property
    def next_seq(self) -> int:
        """The number that the next batch will have."""
        return self._log.next_seq

    def append(self, changes: Sequence[Change]) -> list[Frames]:
        """Return the messages to publish, in order: one for up to `BATCH_HASHES_MAX` changes.

        Order is kept, so that a removal before a store stays before it. Runs of changes that differ
        only in their key share one event.
        """
        return [
            self._publish(_events(changes[start : start + BATCH_HASHES_MAX]))
            for start in range(0, len(changes), BATCH_HASHES_MAX)
        ]

    def heartbeat_due(self, now_s: float) -> bool:
        """Whether the stream was silent for a heartbeat."""
        return now_s - self._spoke_s >= self._heartbeat_s

    def heartbeat(self) -> Frames:
        """Return an empty batch to publish."""
        return self._publish(())

    def replay(self, start_seq: int, manifest: Iterable[Resident] = ()) -> list[Frames]:
        """Return the answer to a replay request, without the ROUTER's identity, end mark last.

        `manifest` is read only if `start_seq` asks for the snapshot.
        """
        return self._log.answer(start_seq, lambda: encode_snapshot(self.snapshot(manifest)))

    def snapshot(self, manifest: Iterable[Resident]) -> Snapshot:
        """Return the whole truth as of the next batch. `manifest` must be in step with `append`."""
        sections: dict[tuple[int, Medium, int], list[int]] = {}
        for resident in manifest:
            section = (key_group(resident.key), resident.medium, resident.chunk_tokens)
            sections.setdefault(section, []).append(key_low64(resident.key))
        packed = tuple(
            SnapshotSection(group, medium.name, tokens, np.array(hashes, dtype="<u8").tobytes())
            for (group, medium, tokens), hashes in sorted(sections.items())
        )
        return Snapshot(self.node, self.epoch, self.next_seq, self._clock.unix_s(), packed)

    def _publish(self, events: tuple[Event, ...]) -> Frames:
        self._spoke_s = self._clock.now_s()
        return self._log.append(encode_batch(EventBatch(self._clock.unix_s(), events, 0)))


def _events(changes: Sequence[Change]) -> tuple[Event, ...]:
    events: list[Event] = []
    hashes: list[int] = []
    for index, change in enumerate(changes):
        hashes.append(key_low64(change.key))
        follower = changes[index + 1] if index + 1 < len(changes) else None
        if follower is None or _kind(follower) != _kind(change):
            events.append(_event(change, hashes))
            hashes = []
    return tuple(events)


def _kind(change: Change) -> tuple[int, Medium, bool, int]:
    return key_group(change.key), change.medium, change.removed, change.chunk_tokens


def _event(change: Change, hashes: Sequence[int]) -> Event:
    group = key_group(change.key)
    if change.removed:
        return chunks_removed(hashes, group, change.medium)
    return chunks_stored(hashes, group, change.medium, change.chunk_tokens)
