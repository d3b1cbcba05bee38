"""What the pool tells the world: host region, tiers and the engines' GPUs, as one event stream.

The host region, each tier and each engine announce a chunk once when they gain it and once when
they lose it. The manifest for snapshots is the directory's own content, what the tiers announced,
and what the engines said (`gpu`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ...fabric.events import Frames
from ...fabric.types import ChunkKey, Medium, NamespaceId, key_group
from ..base import Tier
from ..event_log import Change, EventLog, Resident
from .context import PoolContext

UNKNOWN_CHUNK_TOKENS = 0
"""For chunks of a group that no client has named since the pool started (vLLM's placeholder)."""


class PoolStream:
    """Collects changes and turns them into frames."""

    def __init__(self, log: EventLog, context: PoolContext, tiers: Sequence[Tier]) -> None:
        self.log = log
        self._directory = context.directory
        self._gpu = context.gpu
        self._tiers = tuple(tiers)
        self._clock = context.clock
        self._recorder = context.recorder
        self._below: Counter[tuple[ChunkKey, Medium]] = Counter()
        self.chunk_tokens: Callable[[NamespaceId, int], int] = _unknown
        """Set by the core: how many tokens a group's chunks have."""

    def take_frames(self) -> list[Frames]:
        """Return what is to be published now."""
        changes = [
            self._change(change.namespace, change.key, Medium.CPU, removed=not change.stored)
            for change in self._directory.take_changes()
        ]
        for tier in self._tiers:
            for event in tier.take_events():
                for key in event.keys:
                    self._note(key, tier.medium, removed=event.removed)
                    changes.append(
                        self._change(event.namespace, key, tier.medium, removed=event.removed)
                    )
        changes += [
            self._change(change.namespace, change.key, Medium.GPU, removed=change.removed)
            for change in self._gpu.take_changes()
        ]
        if changes:
            removed = sum(change.removed for change in changes)
            stored = len(changes) - removed
            self._recorder.count("kvfabric_events_published_total", stored, event="stored")
            self._recorder.count("kvfabric_events_published_total", removed, event="removed")
            return self.log.append(changes)
        if self.log.heartbeat_due(self._clock.now_s()):
            return [self.log.heartbeat()]
        return []

    def replay(self, start_seq: int) -> list[Frames]:
        """Return the answer to a replay or snapshot request."""
        return self.log.replay(start_seq, self._manifest())

    def _change(
        self, namespace: NamespaceId, key: ChunkKey, medium: Medium, *, removed: bool
    ) -> Change:
        return Change(key, medium, removed, self.chunk_tokens(namespace, key_group(key)))

    def _note(self, key: ChunkKey, medium: Medium, *, removed: bool) -> None:
        self._below[key, medium] += -1 if removed else 1
        if self._below[key, medium] <= 0:
            del self._below[key, medium]

    def _manifest(self) -> Iterator[Resident]:
        for namespace, chunk in self._directory.ready_chunks():
            key = chunk.key
            yield Resident(key, Medium.CPU, self.chunk_tokens(namespace, key_group(key)))
        for namespace, key in self._gpu.residents():
            yield Resident(key, Medium.GPU, self.chunk_tokens(namespace, key_group(key)))
        for (key, medium), count in self._below.items():
            for _ in range(count):
                yield Resident(key, medium, UNKNOWN_CHUNK_TOKENS)


def _unknown(_namespace: NamespaceId, _group: int) -> int:
    return UNKNOWN_CHUNK_TOKENS
