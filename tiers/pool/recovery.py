"""Reading back the records of a table that an earlier pool left behind."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ...fabric.errors import Corrupt
from ...fabric.records import STATE_WORDS, SlotRecord, tags_of
from ...fabric.types import ChunkKey, NamespaceId, SlotState
from .slots import SlotEntry
from .table import SlotTable

GENERATION_STRIDE = 1 << 32
"""How far generations jump when a record could not be read, because its generation may have been
the highest. Nobody reuses one slot four thousand million times while all others rest."""

IsAlive = Callable[[int, int], bool]
"""Whether the process with this pid and start time still runs."""


@dataclass(slots=True)
class Recovered:
    """What the records say. Every slot that is in neither list is free."""

    ready: list[SlotEntry] = field(default_factory=list[SlotEntry])
    """In the order in which they were reserved."""
    quarantined: list[SlotEntry] = field(default_factory=list[SlotEntry])
    generation: int = 0
    """None was given out above it."""
    freed: int = 0
    dropped: int = 0


def recover(table: SlotTable, alive: IsAlive) -> Recovered:
    """Read every record. Changes nothing.

    READY is kept. WRITING and QUARANTINED are quarantined while their owner lives, else free. A
    record that cannot be believed is dropped: its slot is free, unless it may be the slot of a
    live writer.
    """
    found = Recovered()
    listed: dict[tuple[NamespaceId, ChunkKey], SlotEntry] = {}
    for slot in table.used_slots():
        try:
            record = table.read(slot)
        except Corrupt:
            _drop(table, slot, alive, found)
            continue
        found.generation = max(found.generation, record.generation)
        entry = _entry(slot, record)
        if record.state is SlotState.READY:
            _keep(listed, entry, found)
        elif record.state is not SlotState.FREE:
            if record.owner_pid and alive(record.owner_pid, record.owner_started):
                found.quarantined.append(entry)
            else:
                found.freed += 1
    if found.dropped:
        found.generation += GENERATION_STRIDE
    found.ready = sorted(listed.values(), key=_generation)
    _tag(found.ready)
    return found


def _tag(entries: list[SlotEntry]) -> None:
    """Set the tags, a namespace at a time: one by one they take most of the time of an adoption."""
    by_namespace: dict[NamespaceId, list[SlotEntry]] = {}
    for entry in entries:
        by_namespace.setdefault(entry.namespace, []).append(entry)
    for namespace, members in by_namespace.items():
        tags = tags_of(namespace, [entry.key for entry in members]).tolist()
        for entry, tag in zip(members, tags, strict=True):
            entry.tag = tag


def _keep(
    listed: dict[tuple[NamespaceId, ChunkKey], SlotEntry], entry: SlotEntry, found: Recovered
) -> None:
    """Keep the younger of two records with one key: only one can have been readable."""
    other = listed.get((entry.namespace, entry.key))
    if other is not None:
        found.dropped += 1
    if other is None or other.generation < entry.generation:
        listed[entry.namespace, entry.key] = entry


def _drop(table: SlotTable, slot: int, alive: IsAlive, found: Recovered) -> None:
    found.dropped += 1
    word = table.state_word(slot)
    pid, started = table.claimed_owner(slot)
    settled = word in (STATE_WORDS[SlotState.FREE], STATE_WORDS[SlotState.READY])
    if settled or pid == 0 or not alive(pid, started):
        return
    entry = SlotEntry(NamespaceId(b""), ChunkKey(b""), 0)
    entry.slot, entry.owner_pid, entry.owner_started = slot, pid, started
    entry.state, entry.listed = SlotState.QUARANTINED, False
    found.quarantined.append(entry)


def _entry(slot: int, record: SlotRecord) -> SlotEntry:
    entry = SlotEntry(record.namespace, record.key, 0)
    entry.slot, entry.generation = slot, record.generation
    entry.length_bytes, entry.depth = record.length_bytes, record.depth
    entry.checksum = record.checksum
    entry.owner_pid, entry.owner_started = record.owner_pid, record.owner_started
    entry.listed = record.state is SlotState.READY
    entry.state = SlotState.READY if entry.listed else SlotState.QUARANTINED
    return entry


def _generation(entry: SlotEntry) -> int:
    return entry.generation
