"""What a pool finds in the table that an earlier one left."""

import hashlib
from collections.abc import Callable

import pytest

from kvfabric.fabric.records import SlotRecord, record_offset
from kvfabric.fabric.types import (
    Chunk,
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Reserved,
    SlotState,
    make_key,
)
from kvfabric.tiers.pool.directory import Directory
from kvfabric.tiers.pool.reader import TableReader
from kvfabric.tiers.pool.recovery import GENERATION_STRIDE
from kvfabric.tiers.pool.table import SlotTable, control_bytes, format_table
from kvfabric.tiers.pool.values import Adopted

NS = NamespaceId(b"n" * 16)
SLOTS = 8
FIELDS = {
    "key": range(36),
    "key_bytes": range(36, 40),
    "namespace": range(40, 56),
    "generation": range(56, 64),
    "length": range(64, 72),
    "checksum": range(72, 80),
    "depth": range(80, 84),
    "owner": range(84, 96),
    "reserved": range(96, 112),
    "record checksum": range(112, 120),
    "state": range(120, 128),
}


def key(number: int) -> ChunkKey:
    return make_key(hashlib.sha256(b"%d" % number).digest(), 0)


def directory(buffer: bytearray) -> Directory:
    return Directory(SlotTable(memoryview(buffer)), quarantine_slots_max=SLOTS)


def nobody(_pid: int, _started: int) -> bool:
    return False


def only(*alive: tuple[int, int]) -> Callable[[int, int], bool]:
    return lambda pid, started: (pid, started) in alive


def used() -> tuple[bytearray, Directory]:
    """Chunks 0-2 ready, 3 written by process (1, 101), 4 and 5 quarantined of process (2, 102)."""
    buffer = bytearray(control_bytes(SLOTS))
    format_table(buffer, SLOTS, 4096, SLOTS * 4096, 1)
    d = directory(buffer)
    d.open_owner("a", 10.0, 1, 101, 5.0)
    d.open_owner("b", 10.0, 2, 102, 0.0)
    refs = [r.slot for r in d.reserve("a", NS, [key(n) for n in range(3)], range(3), [64] * 3, 5.0)]
    assert set(d.commit("a", refs, [1000, 1001, 1002], 5.0)) == {Committed.READY}
    d.reserve("a", NS, [key(3)], [3], [64], 5.0)
    d.reserve("b", NS, [key(4), key(5)], [4, 5], [64] * 2, 0.0)
    assert d.expire(11.0) == ("b",)
    return buffer, d


def test_ready_is_kept_and_the_rest_depends_on_its_owners():
    buffer, _ = used()
    reader = TableReader(memoryview(buffer))
    d = directory(buffer)
    assert d.stats().free == 0
    assert d.adopt(only((2, 102))) == Adopted(ready=3, quarantined=2, freed=1, dropped=0)
    d.check()
    states = reader.lookup(NS, [key(n) for n in range(8)]).states.tolist()
    assert states == [Lookup.HIT] * 3 + [Lookup.MISS] * 5
    assert [c.checksum for _, c in d.ready_chunks()] == [1002, 1001, 1000]
    assert [(c.key, c.stored) for c in d.take_changes()] == [
        (key(2), True),
        (key(1), True),
        (key(0), True),
    ]
    assert d.stats().free == SLOTS - 5


def test_generations_go_on_after_adoption():
    buffer, before = used()
    last = before.reserve("a", NS, [key(7)], [0], [1], 12.0)[0].slot.generation
    d = directory(buffer)
    d.adopt(nobody)
    d.open_owner("c", 1.0, 3, 3, 0.0)
    assert d.reserve("c", NS, [key(8)], [0], [1], 0.0)[0].slot.generation == last + 1


def test_an_owner_that_comes_back_may_abort_what_it_was_used():
    buffer, before = used()
    (_, chunk), *_ = before.ready_chunks()
    d = directory(buffer)
    d.adopt(only((1, 101), (2, 102)))
    assert d.stats().quarantined == 3
    d.open_owner("new name", 10.0, 2, 102, 0.0)
    d.abort("new name", [chunk.slot])
    assert d.stats().quarantined == 3
    d.owner_gone("new name")
    assert d.stats().quarantined == 3
    d.process_gone(2, 102)
    assert d.stats().quarantined == 1
    d.process_gone(1, 101)
    assert d.stats().quarantined == 0
    d.check()


def test_one_owner_leaving_does_not_free_what_its_process_may_still_write():
    buffer, _ = used()
    d = directory(buffer)
    d.adopt(only((2, 102)))
    d.open_owner("b1", 10.0, 2, 102, 0.0)
    d.owner_gone("b1")  # before "b", who writes, has heard of the new pool
    assert d.stats().quarantined == 2
    d.open_owner("c", 10.0, 3, 103, 0.0)
    granted = d.reserve("c", NS, [key(n) for n in range(10, 13)], range(3), [64] * 3, 0.0)
    assert {one.slot.slot for one in granted}.isdisjoint({4, 5})
    d.process_gone(2, 102)
    assert d.stats().quarantined == 0
    d.check()


def test_abort_by_reference_after_adoption():
    buffer = bytearray(control_bytes(SLOTS))
    format_table(buffer, SLOTS, 4096, SLOTS * 4096, 1)
    before = directory(buffer)
    before.open_owner("a", 10.0, 1, 101, 0.0)
    refs = [r.slot for r in before.reserve("a", NS, [key(1), key(2)], [0, 1], [1, 1], 0.0)]
    d = directory(buffer)
    assert d.adopt(only((1, 101))).quarantined == 2
    d.open_owner("a", 10.0, 1, 101, 0.0)
    d.open_owner("b", 10.0, 2, 102, 0.0)
    assert d.reserve("b", NS, [key(1)], [0], [1], 0.0)[0].status is Reserved.GRANTED
    d.abort("b", refs)
    assert d.stats().quarantined == 2
    d.abort("a", refs[:1])
    assert d.commit("a", refs, [5, 5], 0.0) == (Committed.LOST, Committed.LOST)
    assert d.stats().quarantined == 0
    d.check()


def test_nothing_is_given_out_before_adoption():
    buffer, _ = used()
    d = directory(buffer)
    d.open_owner("a", 10.0, 1, 101, 0.0)
    assert d.reserve("a", NS, [key(9)], [0], [1], 0.0)[0].status is Reserved.BUSY


def test_condemned_chunks_do_not_come_back():
    buffer, before = used()
    (_, chunk), *_ = before.ready_chunks()
    before.pin("b", NS, [chunk.key], 12.0)
    before.drop([chunk.slot])
    d = directory(buffer)
    assert d.adopt(only((1, 101))).ready == 2
    assert d.stats().quarantined == 1


@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_costs_the_chunk_and_never_serves_a_wrong_one(field: str):
    pristine, _ = used()
    chunks = {c.key: c for _, c in directory_of(bytearray(pristine)).ready_chunks()}
    for slot in range(SLOTS):
        for at, byte in enumerate(FIELDS[field]):
            bits = range(8) if field == "state" else ((slot + at) % 8,)
            for bit in bits:
                buffer = bytearray(pristine)
                buffer[record_offset(slot) + byte] ^= 1 << bit
                d = directory_of(buffer, only((1, 101), (2, 102)))
                assert_only_sound_chunks(d, buffer, chunks)
                if field != "owner":
                    # Of the slots that live processes might still write, none became free.
                    assert d.stats().quarantined >= 3


def assert_only_sound_chunks(
    d: Directory, buffer: bytearray, chunks: dict[ChunkKey, Chunk]
) -> None:
    """At most one chunk is missing, and what is there is right, inside and for a reader."""
    d.check()
    found = {c.key: c for _, c in d.ready_chunks()}
    assert all(chunks[k] == c for k, c in found.items())
    assert len(found) >= len(chunks) - 1
    served = TableReader(memoryview(buffer)).lookup(NS, list(chunks))
    for k, state, slot in zip(chunks, served.states, served.slots, strict=True):
        assert (state == Lookup.HIT) == (k in found)
        assert state != Lookup.HIT or slot == chunks[k].slot.slot


def directory_of(buffer: bytearray, alive: Callable[[int, int], bool] = nobody) -> Directory:
    d = directory(buffer)
    d.adopt(alive)
    return d


def test_generations_jump_when_a_record_could_not_be_read():
    buffer, _ = used()
    buffer[record_offset(0) + 60] ^= 1
    d = directory(buffer)
    assert d.adopt(nobody).dropped == 1
    d.open_owner("c", 1.0, 3, 3, 0.0)
    generation = d.reserve("c", NS, [key(8)], [0], [1], 0.0)[0].slot.generation
    assert GENERATION_STRIDE < generation < 2 * GENERATION_STRIDE


class Watched:
    """A part of a table that shows the whole buffer to a witness after every store."""

    def __init__(self, part: memoryview, witness: Callable[[], None]) -> None:
        self.part, self.witness = part, witness

    def __getitem__(self, at):
        return self.part[at]

    def __setitem__(self, at, value) -> None:
        self.part[at] = value
        self.witness()


def test_a_pool_killed_between_any_two_stores_is_read_back_sound():
    """After every store of records and index: a new pool, and a reader, see no half-made chunk."""
    buffer = bytearray(control_bytes(4))
    format_table(buffer, 4, 4096, 4 * 4096, 1)
    table = SlotTable(memoryview(buffer))
    committed: dict[ChunkKey, int] = {}
    seen = [0, 0]

    def witness() -> None:
        seen[0] += 1
        for slot in range(4):
            raw = buffer[record_offset(slot) : record_offset(slot + 1)]
            if raw[120] == SlotState.READY:
                SlotRecord.decode(bytes(raw))
        answer = TableReader(memoryview(bytes(buffer))).lookup(NS, [key(n) for n in range(10)])
        for number in range(10):
            if answer.states[number] == Lookup.HIT:
                assert answer.checksums[number] == committed[key(number)]
        d = directory_of(bytearray(buffer))
        d.check()
        for _, chunk in d.ready_chunks():
            seen[1] += 1
            assert chunk.checksum == committed[chunk.key]

    d = Directory(table, quarantine_slots_max=4)
    for holder, names in ((table, ("_words", "_records")), (table.index, ("_words", "_halves"))):
        for name in names:
            setattr(holder, name, Watched(getattr(holder, name), witness))
    d.open_owner("a", 10.0, 1, 101, 0.0)
    for turn in range(10):
        keys = [key(turn), key((turn + 1) % 10)]
        granted = d.reserve("a", NS, keys, [0, 1], [64, 64], 0.0)
        for chunk, reserved in zip(keys, granted, strict=True):
            if reserved.status is Reserved.GRANTED:
                committed[chunk] = reserved.slot.generation
                d.commit("a", [reserved.slot], [reserved.slot.generation], 0.0)
    assert seen[0] > 100
    assert seen[1] > 100
