"""The directory of a pool: who may write, read and reuse which slot. Pure: no clock and no I/O.

Ownership. The directory is the only writer of its table. An *owner* holds one lease: a client's
process, a grant to a peer (pid 0: it holds pins only), or a job of the pool itself. A slot that is
being written belongs to its owner; one that is ready belongs to the directory, and a pin forbids
its reuse.

Lifecycle of a slot. `reserve` makes it WRITING; `commit` makes it READY and visible; eviction,
`drop` and `retire` free it, at once or when its last pin goes. A lease that ends quarantines what
its owner was writing: neither readable nor reusable, because the owner may be stopped and not dead.
Only `abort`, a late `commit`, `owner_gone` and `process_gone` free a quarantined slot.

Failure. Every call finishes or changes nothing. A stale reference is LOST and does no harm: a
generation is given out once in the life of the files. An owner that is not known is refused what it
asks: BUSY, MISS, LOST. Input that no client may send raises `Malformed` before anything changes.

Threading. One thread. Readers of the table in other processes are told nothing and need no lock.

Time. Every call that has `now_s` first ends the leases that are over by then, and then counts as a
sign of life of its owner.
"""

from collections.abc import Iterator, Sequence

from ...fabric.errors import Conservation, Malformed, Unsupported
from ...fabric.records import tags_of
from ...fabric.types import (
    Chunk,
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Released,
    Reserved,
    SlotRef,
    SlotState,
)
from .batch import require_batch
from .inventory import Inventory
from .owners import Leases, Owner
from .recovery import IsAlive, recover
from .slots import SlotEntry
from .table import SlotTable
from .values import NO_SLOT, Adopted, Change, DirectoryStats, Pinned, Reservation

CHANGES_MAX = 1 << 20
"""Changes that nobody has taken yet. Past it reservations are BUSY: a router that is never told
would believe in chunks that are gone."""

_PRESENT = Reservation(Reserved.PRESENT, NO_SLOT)
_PENDING = Reservation(Reserved.PENDING, NO_SLOT)
_BUSY = Reservation(Reserved.BUSY, NO_SLOT)


class Directory:
    """Decides over the slots of one table. See the module's text for what callers may rely on.

    For a table that was used before, `adopt` must be called before anything else; until then every
    reservation is BUSY.
    """

    def __init__(self, table: SlotTable, *, quarantine_slots_max: int) -> None:
        self._table = table
        self._quarantine_slots_max = quarantine_slots_max
        self._slots = Inventory(table)
        self._leases = Leases()
        self._unclaimed: dict[tuple[int, int], dict[int, SlotEntry]] = {}
        self._ended: dict[str, None] = {}
        self._evictions = self._dropped = self._retired = self._busy = 0
        self._hits = self._misses = self._lost = self._lapses = 0

    def adopt(self, alive: IsAlive) -> Adopted:
        """Take over what an earlier pool left in the table, and rebuild the index from it.

        `alive` says whether a process (pid, start time in clock ticks) still runs. Every chunk that
        is kept is reported as a change. To be called on a directory that has done nothing yet.
        """
        found = recover(self._table, alive)
        self._slots.load(found)
        for entry in found.quarantined:
            process = entry.owner_pid, entry.owner_started
            self._unclaimed.setdefault(process, {})[entry.slot] = entry
        return Adopted(len(found.ready), len(found.quarantined), found.freed, found.dropped)

    def open_owner(
        self, owner: str, lease_s: float, pid: int, pid_started: int, now_s: float
    ) -> None:
        """Know an owner, or hear again from one.

        What its process was writing under an earlier pool it may `abort` as its own. If another
        process had the name, what that one was writing is quarantined until it is gone.
        """
        if not (0 <= pid < 1 << 32 and 0 <= pid_started < 1 << 64):
            raise Malformed("owner", f"pid {pid} started at {pid_started}")
        self._end_leases(now_s)
        known = self._leases.find(owner)
        if known is not None and known.process == (pid, pid_started):
            known.lease_s = lease_s
            self._leases.extend(known, now_s)
            return
        if known is not None:
            self._lapse(known)
            if known.quarantined:
                self._unclaimed.setdefault(known.process, {}).update(known.quarantined)
            self._leases.forget(known)
        self._leases.add(Owner(owner, lease_s, pid, pid_started), now_s)

    def renew(self, owner: str, now_s: float) -> None:
        """Hear from an owner. One whose lease has ended may reserve and pin anew."""
        self._hear(owner, now_s)

    def owner_gone(self, owner: str) -> None:
        """Free all that an owner held: its process is dead, or it said that it will not write.

        What its process was writing under an earlier pool stays quarantined: it may be that of
        another owner of the process, who has not come back yet.
        """
        known = self._leases.find(owner)
        if known is None:
            return
        for entry in (*known.writing.values(), *known.quarantined.values()):
            self._slots.discard(entry)
        self._drop_pins(known)
        self._leases.forget(known)

    def process_gone(self, pid: int, pid_started: int) -> None:
        """Free all that any owner of a dead process held."""
        if pid == 0:
            return
        process = pid, pid_started
        for name in [owner.name for owner in self._leases if owner.process == process]:
            self.owner_gone(name)
        for entry in self._unclaimed.pop(process, {}).values():
            self._slots.discard(entry)

    def unclaimed_processes(self) -> frozenset[tuple[int, int]]:
        """Return pid and start time of the processes that wrote under an earlier pool.

        Whoever is told of the end of such a process must call `process_gone`: it may never attach.
        """
        return frozenset(self._unclaimed)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """End the leases that are over. Returns the owners concerned since the last call.

        Their pins are dropped and what they were writing is quarantined. They stay known until
        `owner_gone`, except those without a process (pid 0).
        """
        self._end_leases(now_s)
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def next_deadline_s(self) -> float:
        """Return when `expire` is due next; infinity if no lease runs."""
        return float("-inf") if self._ended else self._leases.next_deadline_s()

    def reserve(
        self,
        owner: str,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
        depths: Sequence[int],
        lengths: Sequence[int],
        now_s: float,
    ) -> tuple[Reservation, ...]:
        """Give slots to write to every chunk that is not here yet, or to none.

        `lengths` are bytes. Evicts what it needs, tails first, or answers BUSY for all chunks that
        are not PRESENT or PENDING and changes nothing. A key that comes again in the batch is
        PENDING. Raises `Malformed` for input that cannot be stored, `Unsupported` for an owner
        without a process.
        """
        require_batch(namespace, keys, depths, lengths, self._table.header.slot_bytes)
        holder = self._hear(owner, now_s)
        if holder is not None and holder.pid == 0:
            raise Unsupported("owner", owner, "Open it with the pid of the process that writes.")
        listed = self._slots.listed(namespace)
        answers: list[Reservation] = []
        present: set[int] = set()
        fresh: dict[ChunkKey, int] = {}
        for position, key in enumerate(keys):
            entry = listed.get(key)
            if entry is None:
                fresh.setdefault(key, position)
            elif entry.state is SlotState.READY:
                present.add(entry.slot)
            ready = entry is not None and entry.state is SlotState.READY
            answers.append(_PRESENT if ready else _PENDING)
        if holder is None or not self._make_room(len(fresh), present):
            self._busy += len(fresh)
            return tuple(
                _BUSY if key in fresh else answer for key, answer in zip(keys, answers, strict=True)
            )
        positions = list(fresh.values())
        tags = tags_of(namespace, list(fresh)).tolist() if fresh else []
        # The head gets the highest generation, so that an adopted table is evicted tails first too.
        for at in sorted(range(len(positions)), key=lambda at: -depths[positions[at]]):
            position = positions[at]
            entry = SlotEntry(namespace, keys[position], tags[at])
            entry.depth, entry.length_bytes = depths[position], lengths[position]
            entry.owner_pid, entry.owner_started = holder.process
            self._slots.allot(entry)
            holder.writing[entry.slot] = entry
            answers[position] = Reservation(Reserved.GRANTED, entry.ref)
        return tuple(answers)

    def commit(
        self, owner: str, refs: Sequence[SlotRef], checksums: Sequence[int], now_s: float
    ) -> tuple[Committed, ...]:
        """Publish slots that this owner was writing.

        A slot that is quarantined by now is LOST, and free: the commit says that nothing is being
        written any more. The same commit again is READY. Raises `Malformed` for a checksum of 0.
        """
        if len(refs) != len(checksums):
            raise Malformed("commit", f"{len(refs)} slots and {len(checksums)} checksums")
        for checksum in checksums:
            if not 0 < checksum < 1 << 64:
                raise Malformed("commit", f"checksum {checksum}, not 1 to 2**64 - 1")
        holder = self._hear(owner, now_s)
        answers: list[Committed] = []
        published: list[SlotEntry] = []
        for ref, checksum in zip(refs, checksums, strict=True):
            entry = self._slots.find(ref)
            if entry is None or holder is None:
                answers.append(Committed.LOST)
            elif entry.state is SlotState.READY:
                same = entry.listed and entry.checksum == checksum
                answers.append(Committed.READY if same else Committed.LOST)
            elif entry.listed and holder.writing.get(entry.slot) is entry:
                del holder.writing[entry.slot]
                self._slots.publish(entry, checksum)
                published.append(entry)
                answers.append(Committed.READY)
            else:
                self._take_back(holder, entry)
                answers.append(Committed.LOST)
        self._slots.touch(published)
        self._lost += answers.count(Committed.LOST)
        return tuple(answers)

    def abort(self, owner: str, refs: Sequence[SlotRef]) -> None:
        """Free slots that this owner was writing and will not write any more, quarantined or not.

        So may any owner of a process free what was quarantined of that process by an earlier pool.
        """
        holder = self._leases.find(owner)
        for ref in refs:
            entry = self._slots.find(ref)
            if entry is not None and holder is not None:
                self._take_back(holder, entry)

    def pin(
        self, owner: str, namespace: NamespaceId, keys: Sequence[ChunkKey], now_s: float
    ) -> tuple[Pinned, ...]:
        """Pin every chunk that is here, once more for each time it is named."""
        holder = self._hear(owner, now_s)
        listed = self._slots.listed(namespace) if holder is not None else {}
        answers: list[Pinned] = []
        touched: list[SlotEntry] = []
        for key in keys:
            entry = listed.get(key)
            if entry is None or holder is None:
                answers.append(Pinned(Lookup.MISS, Chunk(key, NO_SLOT, 0, 0)))
            elif entry.state is SlotState.WRITING:
                answers.append(Pinned(Lookup.PENDING, Chunk(key, NO_SLOT, 0, 0)))
            else:
                self._slots.pin(entry)
                holder.pins[entry.slot] = holder.pins.get(entry.slot, 0) + 1
                touched.append(entry)
                answers.append(Pinned(Lookup.HIT, entry.chunk))
        self._slots.touch(touched)
        self._hits += len(touched)
        self._misses += len(answers) - len(touched)
        return tuple(answers)

    def release(self, owner: str, refs: Sequence[SlotRef], now_s: float) -> tuple[Released, ...]:
        """Take back one pin of this owner for each time a slot is named."""
        holder = self._hear(owner, now_s)
        answers: list[Released] = []
        for ref in refs:
            entry = self._slots.find(ref)
            held = holder.pins.get(ref.slot, 0) if holder is not None else 0
            if entry is None or holder is None or held == 0:
                answers.append(Released.LOST)
                continue
            if held == 1:
                del holder.pins[ref.slot]
            else:
                holder.pins[ref.slot] = held - 1
            self._slots.unpin(entry, 1)
            answers.append(Released.HELD)
        self._lost += answers.count(Released.LOST)
        return tuple(answers)

    def drop(self, refs: Sequence[SlotRef]) -> None:
        """Find these chunks no longer: a reader saw that their bytes are corrupt."""
        for ref in refs:
            entry = self._slots.find(ref)
            if entry is not None and entry.listed and entry.state is SlotState.READY:
                self._slots.condemn(entry)
                self._dropped += 1

    def retire(self, namespace: NamespaceId) -> None:
        """Find nothing of a namespace any longer, and free it; what is being written is LOST.

        This is an act and not a state: a chunk that is stored under the namespace later is kept
        like any other.
        """
        for entry in list(self._slots.listed(namespace).values()):
            self._retired += 1
            if entry.state is SlotState.READY:
                self._slots.condemn(entry)
            else:
                self._slots.unlist(entry)

    @property
    def epoch(self) -> int:
        """The epoch of the pool that opened the table."""
        return self._table.header.epoch

    def chunk(self, ref: SlotRef) -> Chunk | None:
        """Return the readable chunk in a slot, or None if the reference is stale."""
        entry = self._slots.find(ref)
        if entry is None or entry.state is not SlotState.READY or not entry.listed:
            return None
        return entry.chunk

    def look(self, namespace: NamespaceId, key: ChunkKey) -> Lookup:
        """Say whether a chunk can be read, without pinning or touching it."""
        entry = self._slots.listed(namespace).get(key)
        if entry is None:
            return Lookup.MISS
        return Lookup.HIT if entry.state is SlotState.READY else Lookup.PENDING

    def ready_chunks(self) -> Iterator[tuple[NamespaceId, Chunk]]:
        """Return all that can be read, the next to be evicted first, as it is now."""
        return ((entry.namespace, entry.chunk) for entry in self._slots.ready_entries())

    def take_changes(self) -> tuple[Change, ...]:
        """Return what became readable and what stopped being so since the last call, in order."""
        return self._slots.take_changes()

    def stats(self) -> DirectoryStats:
        """Return gauges and counts."""
        slots = self._slots
        return DirectoryStats(
            slots=self._table.slot_count,
            free=slots.free,
            writing=slots.writing,
            ready=slots.ready,
            quarantined=slots.quarantined,
            condemned=slots.condemned,
            pinned=slots.pinned,
            owners=len(self._leases),
            stored=slots.stored,
            evictions=self._evictions,
            dropped=self._dropped,
            retired=self._retired,
            busy=self._busy,
            hits=self._hits,
            misses=self._misses,
            lost=self._lost,
            lapses=self._lapses,
            crowded=slots.crowded,
        )

    def check(self) -> None:
        """Raise `Conservation` if the books do not balance. Reads every slot: not for each call."""
        self._slots.check()
        owners = list(self._leases)
        writing = sum(len(owner.writing) for owner in owners)
        quarantined = sum(len(owner.quarantined) for owner in owners)
        quarantined += sum(len(entries) for entries in self._unclaimed.values())
        if (writing, quarantined) != (self._slots.writing, self._slots.quarantined):
            raise Conservation(
                "what owners hold",
                f"{writing} writing and {quarantined} quarantined, the slots have "
                f"{self._slots.writing} and {self._slots.quarantined}",
            )
        self._slots.check_pins([owner.pins for owner in owners])

    def _make_room(self, count: int, spared: set[int]) -> bool:
        """Evict until `count` slots are free, sparing some slots; or change nothing."""
        if not count:
            return True
        lacking = count - self._slots.free
        victims = self._slots.victims(lacking, spared)
        if (
            len(victims) < lacking
            or self._slots.quarantined > self._quarantine_slots_max
            or self._slots.changes > CHANGES_MAX
        ):
            return False
        for victim in victims:
            self._slots.discard(victim)
        self._evictions += len(victims)
        return True

    def _hear(self, owner: str, now_s: float) -> Owner | None:
        """End what is over, then take a call as a sign of life. None if the owner is not known."""
        self._end_leases(now_s)
        known = self._leases.find(owner)
        if known is not None:
            self._leases.extend(known, now_s)
        return known

    def _end_leases(self, now_s: float) -> None:
        for owner in self._leases.pop_due(now_s):
            self._lapse(owner)
            self._lapses += 1
            self._ended[owner.name] = None
            if owner.pid == 0:
                self._leases.forget(owner)

    def _lapse(self, owner: Owner) -> None:
        for entry in owner.writing.values():
            self._slots.quarantine(entry)
        owner.quarantined.update(owner.writing)
        owner.writing.clear()
        self._drop_pins(owner)

    def _drop_pins(self, owner: Owner) -> None:
        for slot, count in owner.pins.items():
            self._slots.unpin(self._slots.pinned_at(slot), count)
        owner.pins.clear()

    def _take_back(self, holder: Owner, entry: SlotEntry) -> None:
        """Free what a holder says it will not write, if it is its own."""
        unclaimed = self._unclaimed.get(holder.process, {})
        for held in (holder.writing, holder.quarantined, unclaimed):
            if held.get(entry.slot) is entry:
                del held[entry.slot]
                self._slots.discard(entry)
        if not unclaimed:
            self._unclaimed.pop(holder.process, None)
