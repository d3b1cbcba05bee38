"""The slots of a table and the keys that lead to them. The mechanics under `directory`.

Every method moves one slot from one state to another, in memory, in the table and in the index, and
keeps the books: free, writing, ready, quarantined and condemned slots add up to all slots. Who may
ask for what is the directory's business.

Order of stores. A key leaves the index before its slot's record changes, and enters it after the
record is written, so that a reader in another process never finds a key at another key's record.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from ...fabric.errors import Conservation
from ...fabric.records import STATE_WORDS
from ...fabric.types import ChunkKey, NamespaceId, SlotRef, SlotState
from .index import Indexed
from .lru import LruOrder
from .recovery import Recovered
from .slots import SlotEntry
from .table import SlotTable
from .values import Change

EPOCH_SHIFT = 20
"""Generations begin at the epoch, in milliseconds since 1970, times 2^20: files that were made anew
never repeat one, since no pool reserves 2^20 slots in a millisecond, and 2^63 is centuries away."""

_NOTHING: Mapping[ChunkKey, SlotEntry] = {}


class Inventory:
    """Slots by number, keys by namespace, and the order of eviction.

    A table that was used before has no free slot until `load`.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._entries: list[SlotEntry | None] = [None] * table.slot_count
        self._listed: dict[NamespaceId, dict[ChunkKey, SlotEntry]] = {}
        self._lru = LruOrder()
        self._free: list[int] = [] if table.used_slots() else _descending(table.slot_count)
        self._generation = table.header.epoch << EPOCH_SHIFT
        self._changes: list[Change] = []
        self.writing = self.quarantined = self.condemned = self.pinned = 0
        self.stored = self.crowded = 0

    @property
    def free(self) -> int:
        """Slots that may be allotted."""
        return len(self._free)

    @property
    def ready(self) -> int:
        """Slots whose chunk can be found and read."""
        return len(self._lru)

    @property
    def changes(self) -> int:
        """Changes that were not taken yet."""
        return len(self._changes)

    def load(self, found: Recovered) -> None:
        """Take over what an earlier pool left in the table, and rebuild the index from it."""
        self._table.index.clear()
        self._generation = max(self._generation, found.generation)
        for entry in (*found.ready, *found.quarantined):
            self._entries[entry.slot] = entry
        for slot in self._table.used_slots():
            entry = self._entries[slot]
            self._table.set_state(slot, SlotState.FREE if entry is None else entry.state)
        for entry in found.ready:
            self._list(entry)
            self._lru.add(entry)
            self._changes.append(Change(entry.namespace, entry.key, stored=True))
        self.quarantined = len(found.quarantined)
        self._free = [s for s in _descending(self._table.slot_count) if self._entries[s] is None]

    def find(self, ref: SlotRef) -> SlotEntry | None:
        """Return what the reference means, or None if it is stale."""
        if not 0 <= ref.slot < len(self._entries):
            return None
        entry = self._entries[ref.slot]
        return entry if entry is not None and entry.generation == ref.generation else None

    def listed(self, namespace: NamespaceId) -> Mapping[ChunkKey, SlotEntry]:
        """Return what can be found in a namespace: slots that are WRITING or READY."""
        return self._listed.get(namespace, _NOTHING)

    def victims(self, count: int, spared: AbstractSet[int]) -> list[SlotEntry]:
        """Return the `count` slots to evict next, or fewer if there are no more."""
        return self._lru.victims(count, spared)

    def ready_entries(self) -> Iterator[SlotEntry]:
        """Return all that can be read, the next to be evicted first."""
        return iter(tuple(self._lru.entries()))

    def allot(self, entry: SlotEntry) -> None:
        """Give a new entry a free slot and a generation of its own. FREE -> WRITING."""
        self._generation += 1
        entry.generation = self._generation
        entry.slot = self._free.pop()
        self._entries[entry.slot] = entry
        self.writing += 1
        self._table.begin(entry)
        self._list(entry)

    def publish(self, entry: SlotEntry, checksum: int) -> None:
        """Make a listed slot readable. WRITING -> READY; the caller touches it."""
        entry.checksum = checksum
        entry.owner_pid = entry.owner_started = 0
        entry.state = SlotState.READY
        self._table.publish(entry.slot, checksum)
        self.writing -= 1
        self.stored += 1
        self._lru.add(entry)
        self._changes.append(Change(entry.namespace, entry.key, stored=True))

    def touch(self, batch: list[SlotEntry]) -> None:
        """Move a batch of readable slots to the recent end, tails first."""
        self._lru.touch(batch)

    def unlist(self, entry: SlotEntry) -> None:
        """Let the key lead here no longer."""
        if not entry.listed:
            return
        self._table.index.remove(entry.tag, entry.slot)
        entry.listed = False
        keys = self._listed[entry.namespace]
        del keys[entry.key]
        if not keys:
            del self._listed[entry.namespace]
        if entry.state is SlotState.READY:
            self._lru.remove(entry)
            self._changes.append(Change(entry.namespace, entry.key, stored=False))

    def quarantine(self, entry: SlotEntry) -> None:
        """Neither readable nor reusable. WRITING -> QUARANTINED."""
        self.unlist(entry)
        entry.state = SlotState.QUARANTINED
        self._table.set_state(entry.slot, SlotState.QUARANTINED)
        self.writing -= 1
        self.quarantined += 1

    def discard(self, entry: SlotEntry) -> None:
        """Free a slot that nobody has pinned."""
        was_listed = entry.listed
        self.unlist(entry)
        if entry.state is SlotState.WRITING:
            self.writing -= 1
        elif entry.state is SlotState.QUARANTINED:
            self.quarantined -= 1
        elif not was_listed:
            self.condemned -= 1
        self._table.set_state(entry.slot, SlotState.FREE)
        self._entries[entry.slot] = None
        self._free.append(entry.slot)

    def condemn(self, entry: SlotEntry) -> None:
        """Let a readable slot be found no longer; it is free as soon as it is not pinned."""
        if entry.pins == 0:
            self.discard(entry)
            return
        self.unlist(entry)
        self.condemned += 1
        self._table.set_state(entry.slot, SlotState.QUARANTINED)

    def pin(self, entry: SlotEntry) -> None:
        """Forbid the reuse of a readable slot once more."""
        self.pinned += entry.pins == 0
        entry.pins += 1

    def unpin(self, entry: SlotEntry, count: int) -> None:
        """Take `count` pins back. A condemned slot is free after the last."""
        entry.pins -= count
        if entry.pins == 0:
            self.pinned -= 1
            if not entry.listed:
                self.discard(entry)

    def pinned_at(self, slot: int) -> SlotEntry:
        """Return what a pinned slot holds; a pinned slot is never free."""
        entry = self._entries[slot]
        if entry is None or entry.pins == 0:
            raise Conservation("pins", f"slot {slot} is held by an owner and has no pin")
        return entry

    def take_changes(self) -> tuple[Change, ...]:
        """Return the changes since the last call, in order."""
        taken = tuple(self._changes)
        self._changes.clear()
        return taken

    def check(self) -> None:
        """Raise `Conservation` if the books, the table and the index disagree."""
        entries = [entry for entry in self._entries if entry is not None]
        states = [_state_of(entry) for entry in entries]
        counted = {name: states.count(name) for name in ("writing", "quarantined", "condemned")}
        kept = {name: getattr(self, name) for name in counted}
        _require(counted == kept, "states of slots", f"counted {counted}, kept {kept}")
        _require(
            len(self._free) + len(entries) == self._table.slot_count
            and len(set(self._free)) == len(self._free)
            and all(self._entries[slot] is None for slot in self._free),
            "slots",
            f"{len(self._free)} free + {len(entries)} used of {self._table.slot_count}",
        )
        _require(
            self.pinned == sum(entry.pins > 0 for entry in entries)
            and all(entry.pins >= 0 for entry in entries),
            "pins",
            f"{self.pinned} slots pinned",
        )
        ready = {entry.slot for entry in entries if _state_of(entry) == "ready"}
        _require(
            ready == {entry.slot for entry in self._lru.entries()},
            "ready slots",
            f"{len(ready)} ready, {len(self._lru)} in the order of eviction",
        )
        listed = sorted(entry.slot for entry in entries if entry.listed)
        by_key = sorted(entry.slot for keys in self._listed.values() for entry in keys.values())
        _require(listed == by_key, "keys", f"{len(listed)} listed, {len(by_key)} by key")
        named = set(self._table.index.named())
        _require(
            named <= set(listed) and len(listed) - len(named) <= self.crowded,
            "key index",
            f"{len(named)} named of {len(listed)}, {self.crowded} crowded",
        )
        self._check_table(entries)

    def check_pins(self, holdings: Iterable[Mapping[int, int]]) -> None:
        """Raise `Conservation` unless owners' pins, by slot, add up to the slots' pins."""
        held: Counter[int] = Counter()
        for pins in holdings:
            held.update(pins)
        kept = {entry.slot: entry.pins for entry in self._entries if entry and entry.pins}
        _require(dict(held) == kept, "pins", f"owners hold {dict(held)}, slots have {kept}")

    def _check_table(self, entries: list[SlotEntry]) -> None:
        for slot in self._free:
            word = self._table.state_word(slot)
            _require(word == 0, "table", f"slot {slot} is free, its record says {word:#x}")
        for entry in entries:
            condemned = _state_of(entry) == "condemned"
            state = SlotState.QUARANTINED if condemned else entry.state
            word = self._table.state_word(entry.slot)
            _require(
                word == STATE_WORDS[state],
                "table",
                f"slot {entry.slot} is {state.name}, its record says {word:#x}",
            )

    def _list(self, entry: SlotEntry) -> None:
        self._listed.setdefault(entry.namespace, {})[entry.key] = entry
        if self._table.index.insert(entry.tag, entry.slot) is Indexed.CROWDED:
            self.crowded += 1


def _state_of(entry: SlotEntry) -> str:
    if entry.state is SlotState.READY:
        return "ready" if entry.listed else "condemned"
    return entry.state.name.lower()


def _descending(count: int) -> list[int]:
    """Return the numbers below `count` such that `pop` gives the lowest first."""
    return list(range(count - 1, -1, -1))


def _require(balanced: bool, what: str, numbers: str) -> None:  # noqa: FBT001
    if not balanced:
        raise Conservation(what, numbers)
