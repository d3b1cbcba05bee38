"""Which chunks an engine's own cache has whole, from its blocks that come and go. Pure.

The engine speaks of blocks: a key, the block's hash and its cache group, is there or it is not. A
chunk is there while all its blocks are. Which blocks make a chunk is `learn`t when the engine gives
a block its hash, because the hash alone does not tell; where a chunk is one block there is nothing
to learn.

Ownership. It owns sets of keys, no larger than the engine's cache: what is known of a chunk is
forgotten when its last block leaves. Lifecycle: `touch` and `learn` as they come, `flush` once for
each step. It looks at the engine's cache only then, so that what came and went within a step is no
news. Threading: one thread, the scheduler's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ....fabric.errors import Conservation
from ....fabric.types import GROUP_BYTES, ChunkKey, make_key

Here = Callable[[bytes], bool]
"""Whether the engine's cache has a block with this key."""


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """One cache group of the engine, as far as its chunks are to be announced."""

    blocks_per_chunk: int
    indices: tuple[int, ...]
    """The fabric's cache groups: one, or one for each rank."""
    same: bool
    """Whether that is one of the engine's own number: a block's key is a chunk's key then."""


@dataclass(frozen=True, slots=True)
class GpuChange:
    """What the engine's cache gained and lost, in whole chunks."""

    gained: Sequence[ChunkKey] = ()
    lost: Sequence[ChunkKey] = ()


NOTHING = GpuChange()


class GpuChunks:
    """The chunks of one engine."""

    def __init__(self, groups: Mapping[int, GpuGroup]) -> None:
        self._groups = {
            number.to_bytes(GROUP_BYTES, "big"): group for number, group in groups.items()
        }
        self._touched: dict[bytes, None] = {}
        self._whole: set[bytes] = set()
        """Keys of the last blocks of chunks that are there and were announced."""
        self._blocks: dict[bytes, tuple[bytes, ...]] = {}
        """By the key of a chunk's last block, all its blocks. Only for chunks of several."""
        self._ends: dict[bytes, set[bytes]] = {}
        """By a block's key, the last blocks of the chunks that it is in: prompts that part within
        a chunk share its first blocks."""

    def touch(self, key: bytes) -> None:
        """Look at this block in the next `flush`."""
        self._touched[key] = None

    def learn(self, group: int, first: int, digests: Sequence[bytes], here: Here) -> None:
        """Hear the hashes of a prompt's blocks, from that number `first`, which begins a chunk."""
        tail = group.to_bytes(GROUP_BYTES, "big")
        each = self._groups[tail].blocks_per_chunk
        assert first % each == 0
        for start in range(0, len(digests) - each + 1, each):
            end = digests[start + each - 1] + tail
            if end in self._blocks or not here(end):
                continue
            self._blocks[end] = tuple(one + tail for one in digests[start : start + each])
            for key in self._blocks[end]:
                self._ends.setdefault(key, set()).add(end)
            self.touch(end)

    def flush(self, here: Here) -> GpuChange:
        """Return what changed since the last time."""
        if not self._touched:
            return NOTHING
        gained: list[bytes] = []
        lost: list[bytes] = []
        known, groups = self._whole, self._groups
        ends: dict[bytes, None] = {}
        for key in self._touched:
            group = groups.get(key[-GROUP_BYTES:])
            if group is None:
                continue
            if group.blocks_per_chunk > 1:
                ends.update(dict.fromkeys(sorted(self._ends.get(key, ()))))
            elif here(key) is not (key in known):
                (lost if key in known else gained).append(key)
        for end in ends:
            if all(map(here, self._blocks[end])) is not (end in known):
                (lost if end in known else gained).append(end)
            if not here(end):
                self._forget(end)
        self._touched.clear()
        known.update(gained)
        known.difference_update(lost)
        return GpuChange(self._keys(gained), self._keys(lost))

    def clear(self) -> GpuChange:
        """The engine emptied its cache. Return what it lost."""
        lost = sorted(self._whole)
        for kept in (self._touched, self._whole, self._blocks, self._ends):
            kept.clear()
        return GpuChange((), self._keys(lost))

    def check(self) -> None:
        """Raise `Conservation` unless chunks and their blocks point at each other."""
        known = {(key, end) for end, keys in self._blocks.items() for key in keys}
        if known != {(key, end) for key, ends in self._ends.items() for end in ends}:
            raise Conservation(
                "gpu chunks", f"{len(self._blocks)} chunks, {len(self._ends)} blocks"
            )

    def _forget(self, end: bytes) -> None:
        for key in self._blocks.pop(end):
            self._ends[key].discard(end)
            if not self._ends[key]:
                del self._ends[key]

    def _keys(self, ends: Sequence[bytes]) -> list[ChunkKey]:
        found: list[ChunkKey] = []
        for end in ends:
            group = self._groups[end[-GROUP_BYTES:]]
            if group.same:
                found.append(ChunkKey(end))
            else:
                found += [make_key(end[:-GROUP_BYTES], index) for index in group.indices]
        return found
