"""Who holds what: residency of chunks by source and medium, in one process. Pure.

A residency is (hash, group, source, medium); `hash` is the low 64 bits of a block digest. A
collision costs a pull that misses, because pulls use whole digests. A source is one publisher of
events: a pool, or one data-parallel rank of an engine. Sources and media are bits of one number per
(group, hash), so that the holders of a whole prefix come from a walk of one table, whatever their
number.

Ownership: the index owns all it stores; results are values. Lifecycle: a source exists from its
first event to `drop_source`, which costs time in proportion to the source's own residencies.
Failure: an unknown removal is ignored and counted; past `bytes_max` a store is refused and counted
(a refused residency costs a hit, nothing else). A medium that is not GPU, CPU or STORAGE gives no
credit; no medium at all means GPU, as in events older than media. Threading: one thread at a time.

Where a source announces a residency it has announced already, it counts references, since vLLM
announces overlapping chunks one by one and removes them one by one.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..fabric.errors import ConfigError, Conservation
from ..fabric.events import (
    BlockRemoved,
    BlockStored,
    Event,
    Snapshot,
    SnapshotSection,
    hashes_low64,
)
from ..fabric.types import Medium

MEDIA = len(Medium)
BITS = 4
"""Bits of a source in a mask: one for each medium and one spare, so that a mask prints in hex."""
SOURCES_MAX = 4096
"""A mask has 4 bits a source; more sources than this want an index per part of the fleet."""
ENTRY_BYTES = 130
"""Of one (group, hash) without its mask's digits: dict slot, hash and mask objects."""
RESIDENCY_BYTES = 52
"""Of one more source in it: slot of the source's set. Both measured with CPython 3.11: 158 bytes a
residency with 16 disjoint sources, 225 with 256, 54 where 64 share all."""
BYTES_MAX = 4 << 30
"""Twenty million entries: 20 TiB of KV in chunks of 1 MiB."""

_MEDIUM_OF: dict[str | None, Medium] = {medium.name: medium for medium in Medium} | {
    None: Medium.GPU
}

HashArray = Sequence[int] | npt.NDArray[np.uint64]
_Run = tuple[int, int, int, int | None]
"""Start, count, mask of trusted holders, and that without GPUs: None where it is the same."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a prompt's chunks with the same holders."""

    start: int
    count: int
    holders: dict[str, Medium]
    """By source, the nearest medium in which every group of these chunks is."""
    pooled: dict[str, Medium] | None = None
    """The same without GPUs, whose chunks no pool can give; None: nothing is on one."""

    def in_pool(self, source: str) -> Medium | None:
        """Return the nearest medium from which a source's pool gives these chunks."""
        return (self.holders if self.pooled is None else self.pooled).get(source)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one source has of a prompt, from its head."""

    source: str
    prefix: int
    """Chunks that it holds in any medium."""
    by_medium: tuple[int, ...]
    """Chunks that it holds in each medium alone, indexed by `Medium`.

    Of a chunk whose groups lie in different media the farthest counts."""


@dataclass(slots=True)
class IndexCounts:
    """What happened so far."""

    stored: int = 0
    removed: int = 0
    repeated: int = 0
    unknown_removals: int = 0
    unknown_media: int = 0
    refused: int = 0


@dataclass(slots=True)
class _Source:
    name: str
    slot: int
    trusted: bool = False
    held: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """By group, the hashes in any medium."""
    repeats: dict[tuple[int, int, Medium], int] = field(
        default_factory=dict[tuple[int, int, Medium], int]
    )
    """By (group, hash, medium), announcements beyond the first."""
    chunk_tokens: dict[tuple[int, Medium], int] = field(
        default_factory=dict[tuple[int, Medium], int]
    )

    @property
    def shift(self) -> int:
        return self.slot * BITS


class PrefixIndex:
    """The residency table and its questions."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        """Make an empty index that refuses stores beyond `bytes_max` (its own estimate)."""
        if bytes_max < ENTRY_BYTES:
            raise ConfigError("bytes_max", f"{bytes_max} holds no entry", "Give it megabytes.")
        self.bytes_max = bytes_max
        self.counts = IndexCounts()
        self._tables: dict[int, dict[int, int]] = {}
        self._sources: dict[str, _Source] = {}
        self._slots: list[_Source | None] = []
        self._free_slots: list[int] = []
        self._trusted_mask = 0
        self._entries = 0
        self._residencies = 0

    @property
    def estimated_bytes(self) -> int:
        """Bytes that entries and residencies take up, rather too many than too few.

        Repeated announcements (rare) are not in it: at most one small object a residency.
        """
        return self._entries * self._entry_bytes + self._residencies * RESIDENCY_BYTES

    @property
    def _entry_bytes(self) -> int:
        return ENTRY_BYTES + len(self._slots) * BITS // 8

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources known, in order of their first event."""
        return tuple(self._sources)

    @property
    def residencies(self) -> int:
        """(group, hash, source) triples stored."""
        return self._residencies

    def apply(self, source: str, events: Iterable[Event]) -> None:
        """Take in a source's events, in order."""
        record = self._source(source)
        for event in events:
            if isinstance(event, BlockStored):
                medium = self._medium(event.medium, len(event.block_hashes))
                if medium is not None:
                    group = event.group_idx or 0
                    if event.block_size:
                        record.chunk_tokens[group, medium] = event.block_size
                    self._store(record, group, medium, hashes_low64(event.block_hashes))
            elif isinstance(event, BlockRemoved):
                medium = self._medium(event.medium, len(event.block_hashes))
                if medium is not None:
                    group = event.group_idx or 0
                    self._remove(record, group, medium, hashes_low64(event.block_hashes))
            else:
                self._clear_gpu(record)

    def load(self, source: str, snapshot: Snapshot) -> None:
        """Replace all of a source by its snapshot. Its trust stays as it was."""
        trusted = source in self._sources and self._sources[source].trusted
        self.drop_source(source)
        record = self._source(source)
        self.set_trust(source, trusted=trusted)
        for section in snapshot.sections:
            medium = self._medium(section.medium, len(section.hashes) // 8)
            if medium is not None:
                if section.chunk_tokens:
                    record.chunk_tokens[section.group, medium] = section.chunk_tokens
                self._store(record, section.group, medium, section.array().tolist())

    def dump(self, source: str) -> tuple[SnapshotSection, ...]:
        """Return what is stored of a source, such that `load` restores it."""
        record = self._sources.get(source)
        if record is None:
            return ()
        lists: dict[tuple[int, Medium], list[int]] = {}
        for group, held in record.held.items():
            table = self._tables[group]
            for value in held:
                mine = table[value] >> record.shift
                for medium in Medium:
                    if mine >> medium & 1:
                        times = 1 + record.repeats.get((group, value, medium), 0)
                        lists.setdefault((group, medium), []).extend([value] * times)
        return tuple(
            SnapshotSection(
                group,
                medium.name,
                record.chunk_tokens.get((group, medium), 0),
                np.sort(np.array(values, dtype="<u8")).tobytes(),
            )
            for (group, medium), values in sorted(lists.items())
        )

    def drop_source(self, source: str) -> None:
        """Forget a source. Unknown ones are no error."""
        record = self._sources.pop(source, None)
        if record is None:
            return
        keep = ~(((1 << BITS) - 1) << record.shift)
        for group, held in record.held.items():
            table = self._tables[group]
            for value in held:
                self._put(table, value, table[value] & keep)
            self._residencies -= len(held)
        self._trusted_mask &= keep
        self._slots[record.slot] = None
        self._free_slots.append(record.slot)

    def set_trust(self, source: str, *, trusted: bool) -> None:
        """Give a source's residencies credit, or none while its stream is under repair."""
        record = self._source(source)
        record.trusted = trusted
        bits = ((1 << BITS) - 1) << record.shift
        self._trusted_mask = self._trusted_mask | bits if trusted else self._trusted_mask & ~bits

    def trusted(self, source: str) -> bool:
        """Whether a source gives credit now."""
        return source in self._sources and self._sources[source].trusted

    def spans(self, hashes: HashArray, groups: Sequence[int] = (0,)) -> tuple[Span, ...]:
        """Return the runs of chunks of a prompt and their trusted holders, up to the first gap.

        `hashes`: low 64 bits per chunk from the head, as ints or uint64[n]. A chunk counts where
        every one of `groups` has it; the groups must have equal `chunk_tokens`. The walk ends at
        the first chunk that nobody holds: behind it nothing is a prefix.
        """
        return tuple(
            Span(
                start, count, self._holders(mask), None if pooled is None else self._holders(pooled)
            )
            for start, count, mask, pooled in self._runs(hashes, groups)
        )

    def longest_prefix(
        self, hashes: HashArray, groups: Sequence[int] = (0,)
    ) -> tuple[Holding, ...]:
        """Return per trusted source how much of the head it holds, the longest first.

        Sources that lack the first chunk are left out. Arguments as for `spans`.
        """
        reach: dict[int, list[int]] = {}
        alive: dict[int, int] = {}
        for start, count, mask, _ in self._runs(hashes, groups):
            at_head = start == 0
            going: dict[int, int] = {}
            for slot, code in _decode(mask):
                standing = code if at_head else code & alive.get(slot, 0)
                if code and (at_head or alive.get(slot, 0) >> MEDIA & 1):
                    marks = reach.setdefault(slot, [0] * (MEDIA + 1))
                    for bit in range(MEDIA):
                        if standing >> bit & 1:
                            marks[bit] = start + count
                    marks[MEDIA] = start + count
                    going[slot] = (standing & ((1 << MEDIA) - 1)) | 1 << MEDIA
            alive = going
            if not alive:
                break
        found = [
            Holding(self._name(slot), marks[MEDIA], tuple(marks[:MEDIA]))
            for slot, marks in reach.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.prefix, one.source)))

    def check(self) -> None:
        """Raise `Conservation` unless tables, sources and counters agree."""
        bits = sum(len(held) for one in self._sources.values() for held in one.held.values())
        entries = sum(len(table) for table in self._tables.values())
        if bits != self._residencies or entries != self._entries:
            raise Conservation(
                "router index",
                f"{bits} held, {self._residencies} counted; {entries} entries, {self._entries}",
            )
        for one in self._sources.values():
            for group, held in one.held.items():
                table = self._tables[group]
                if not all(table.get(value, 0) >> one.shift & ((1 << MEDIA) - 1) for value in held):
                    raise Conservation("router index", f"{one.name} holds what no table has")
        marked = sum(
            len(_decode(mask)) for table in self._tables.values() for mask in table.values()
        )
        if marked != bits:
            raise Conservation("router index", f"{marked} marked in tables, {bits} held")

    def _source(self, name: str) -> _Source:
        record = self._sources.get(name)
        if record is not None:
            return record
        if self._free_slots:
            slot = self._free_slots.pop()
        elif len(self._slots) < SOURCES_MAX:
            slot = len(self._slots)
            self._slots.append(None)
        else:
            raise ConfigError("sources", f"more than {SOURCES_MAX}", "Use an index per part.")
        record = self._sources[name] = self._slots[slot] = _Source(name, slot)
        return record

    def _medium(self, name: str | None, hashes: int) -> Medium | None:
        medium = _MEDIUM_OF.get(name)
        if medium is None:
            self.counts.unknown_media += hashes
        return medium

    def _store(self, record: _Source, group: int, medium: Medium, hashes: list[int]) -> None:
        table = self._tables.setdefault(group, {})
        held = record.held.setdefault(group, set())
        bit = 1 << (record.shift + medium)
        room = (self.bytes_max - self.estimated_bytes) // (self._entry_bytes + RESIDENCY_BYTES)
        before, entries = len(held), len(table)
        look = table.get
        for value in hashes:
            mask = look(value, 0)
            if mask & bit:
                self.counts.repeated += 1
                key = (group, value, medium)
                record.repeats[key] = record.repeats.get(key, 0) + 1
                continue
            if value not in held:
                if room <= 0:
                    self.counts.refused += 1
                    continue
                room -= 1
                held.add(value)
            table[value] = mask | bit
            self.counts.stored += 1
        self._residencies += len(held) - before
        self._entries += len(table) - entries

    def _remove(self, record: _Source, group: int, medium: Medium, hashes: list[int]) -> None:
        table = self._tables.get(group, {})
        held = record.held.get(group, set[int]())
        bit = 1 << (record.shift + medium)
        for value in hashes:
            mask = table.get(value, 0)
            if not mask & bit:
                self.counts.unknown_removals += 1
                continue
            key = (group, value, medium)
            more = record.repeats.get(key, 0)
            if more > 1:
                record.repeats[key] = more - 1
            elif more == 1:
                del record.repeats[key]
            else:
                self._unset(record, held, table, value, mask & ~bit)
                self.counts.removed += 1

    def _clear_gpu(self, record: _Source) -> None:
        bit = 1 << (record.shift + Medium.GPU)
        for group, held in record.held.items():
            table = self._tables[group]
            for value in [value for value in held if table[value] & bit]:
                self._unset(record, held, table, value, table[value] & ~bit)
        for key in [key for key in record.repeats if key[2] == Medium.GPU]:
            del record.repeats[key]

    def _unset(
        self, record: _Source, held: set[int], table: dict[int, int], value: int, mask: int
    ) -> None:
        if not mask >> record.shift & ((1 << BITS) - 1):
            held.discard(value)
            self._residencies -= 1
        self._put(table, value, mask)

    def _put(self, table: dict[int, int], value: int, mask: int) -> None:
        if mask:
            table[value] = mask
        else:
            del table[value]
            self._entries -= 1

    def _runs(self, hashes: HashArray, groups: Sequence[int]) -> list[_Run]:
        """Return the runs until nobody holds a chunk."""
        if not len(hashes) or int(hashes[0]) not in self._tables.get(groups[0], {}):
            return []
        values: list[int] = hashes.tolist() if isinstance(hashes, np.ndarray) else list(hashes)
        columns = [
            map(self._tables.get(group, {}).get, values, itertools.repeat(0)) for group in groups
        ]
        runs: list[_Run] = []
        gpu, start = self._all(Medium.GPU), 0
        for masks, run in itertools.groupby(zip(*columns, strict=True)):
            mask = self._credit(masks)
            if not mask:
                break
            count = len(list(run))
            bare = tuple(each & ~gpu for each in masks)
            pooled = None if bare == masks else self._credit(bare)
            runs.append((start, count, mask, pooled))
            start += count
        return runs

    def _credit(self, masks: tuple[int, ...]) -> int:
        """Join the groups' masks: what all have in one medium, and the farthest that one needs."""
        if len(masks) == 1:
            return masks[0] & self._trusted_mask
        gpu, cpu, storage = map(self._all, Medium)
        same = reachable = self._trusted_mask
        for mask in masks:
            near = mask | (mask & gpu) << 1
            near |= (near & cpu) << 1
            same &= mask
            reachable &= near
        nearest = reachable & gpu
        nearest |= reachable & cpu & ~((reachable & gpu) << 1)
        nearest |= reachable & storage & ~((reachable & cpu) << 1)
        return same | nearest

    def _all(self, medium: Medium) -> int:
        """Return the mask of all sources in one medium."""
        return (1 << len(self._slots) * BITS) // ((1 << BITS) - 1) << medium

    def _holders(self, mask: int) -> dict[str, Medium]:
        return {
            self._name(slot): Medium((code & -code).bit_length() - 1)
            for slot, code in _decode(mask)
        }

    def _name(self, slot: int) -> str:
        record = self._slots[slot]
        assert record is not None
        return record.name


def _decode(mask: int) -> list[tuple[int, int]]:
    """Return (slot, media bits) of every source in a mask: one hex digit each."""
    return [
        (slot, int(digit, 16)) for slot, digit in enumerate(reversed(f"{mask:x}")) if digit != "0"
    ]
