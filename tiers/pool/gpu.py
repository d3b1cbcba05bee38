"""What attached engines have in their own caches: books for the pool's event stream. Pure.

Ownership. The bytes are the engines' and nobody else can read them; this remembers, engine by
engine, which chunks each has said to hold. Lifecycle: an engine's chunks are here from its first
`tell` until it takes them back or `leave`s; nothing outlives the pool, to which engines tell
everything when they attach again. Failure: past `chunks_max` a chunk is not taken in and not
announced, which costs a hit and nothing else. Threading: one thread.

Two engines that have one chunk are two residencies, announced and withdrawn one by one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ...fabric.errors import Conservation
from ...fabric.types import ChunkKey, NamespaceId

GPU_CHUNKS_MAX = 1 << 20
"""Residencies of all engines of a node. 8 GPUs with 100 GB of cache each hold 730,000 chunks of 16
tokens of a large MLA model (70 KB a token). Each is 121 bytes here (measured with CPython 3.11), so
127 MB, and 8 MiB of a snapshot."""


@dataclass(frozen=True, slots=True)
class GpuChange:
    """A chunk that an engine's cache gained or lost."""

    namespace: NamespaceId
    key: ChunkKey
    removed: bool


@dataclass(slots=True)
class _Engine:
    namespace: NamespaceId
    keys: dict[ChunkKey, None] = field(default_factory=dict[ChunkKey, None])
    """Ordered, so that equal histories make equal streams."""


class GpuBook:
    """The residencies of all engines of one pool."""

    def __init__(self, chunks_max: int = GPU_CHUNKS_MAX) -> None:
        self.chunks = 0
        """Residencies that are announced."""
        self._chunks_max = chunks_max
        self._engines: dict[str, _Engine] = {}
        self._changes: list[GpuChange] = []
        """Of one turn of the pool, which takes them at its end."""

    def tell(
        self,
        client: str,
        namespace: NamespaceId,
        *,
        whole: bool,
        stored: Iterable[ChunkKey],
        removed: Iterable[ChunkKey],
    ) -> int:
        """Take in what an engine says; return how many chunks there was no room for.

        With `whole` it has what is stored and nothing else. A key in both lists is stored.
        """
        engine = self._engines.setdefault(client, _Engine(namespace))
        wanted = dict.fromkeys(stored)
        over = [key for key in engine.keys if key not in wanted] if whole else removed
        for key in over:
            if key in engine.keys:
                self._lose(engine, key)
        refused = 0
        for key in wanted:
            if key in engine.keys:
                continue
            if self.chunks >= self._chunks_max:
                refused += 1
                continue
            engine.keys[key] = None
            self.chunks += 1
            self._changes.append(GpuChange(namespace, key, removed=False))
        return refused

    def leave(self, client: str) -> None:
        """An engine is gone, or begins anew: withdraw all that it said."""
        engine = self._engines.get(client)
        if engine is not None:
            for key in list(engine.keys):
                self._lose(engine, key)
            del self._engines[client]

    def take_changes(self) -> Sequence[GpuChange]:
        """Return what changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def residents(self) -> Iterator[tuple[NamespaceId, ChunkKey]]:
        """Return every residency, once for each engine that has it."""
        for engine in self._engines.values():
            for key in engine.keys:
                yield engine.namespace, key

    def check(self) -> None:
        """Raise `Conservation` unless the count is that of what is held, within its bound."""
        held = sum(len(engine.keys) for engine in self._engines.values())
        if held != self.chunks or held > self._chunks_max:
            raise Conservation("gpu book", f"{held} held, {self.chunks} counted")

    def _lose(self, engine: _Engine, key: ChunkKey) -> None:
        del engine.keys[key]
        self.chunks -= 1
        self._changes.append(GpuChange(engine.namespace, key, removed=True))
