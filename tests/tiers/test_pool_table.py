"""The slot table and key index, and a reader of them: in one process, over a bytearray."""

import hashlib
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from kvfabric.fabric.errors import ConfigError, Corrupt, Malformed
from kvfabric.fabric.records import PROBES_MAX, RECORD_BYTES, buckets_offset, tags_of
from kvfabric.fabric.types import ChunkKey, Lookup, NamespaceId, SlotState, make_key
from kvfabric.tiers.pool.index import Indexed, KeyIndex
from kvfabric.tiers.pool.reader import TableReader
from kvfabric.tiers.pool.slots import SlotEntry
from kvfabric.tiers.pool.table import SlotTable, control_bytes, format_table

NS = NamespaceId(bytes(range(16)))
GOLDEN = Path(__file__).parent.parent / "golden"


def key(number: int, *, digest_bytes: int = 32) -> ChunkKey:
    return make_key(hashlib.sha256(b"%d" % number).digest()[:digest_bytes], number % 3)


def blank(slots: int) -> bytearray:
    buffer = bytearray(control_bytes(slots))
    format_table(buffer, slots, 4096, slots * 4096, 7)
    return buffer


def put(table: SlotTable, slot: int, chunk: ChunkKey, generation: int, checksum: int) -> SlotEntry:
    """Write one chunk; checksum 0 leaves it WRITING."""
    entry = SlotEntry(NS, chunk, int(tags_of(NS, [chunk])[0]))
    entry.slot, entry.generation, entry.length_bytes = slot, generation, 1000 + slot
    table.begin(entry)
    assert table.index.insert(entry.tag, slot) is Indexed.YES
    if checksum:
        table.publish(slot, checksum)
    return entry


def test_format_says_what_cannot_be_numbered():
    buffer = bytearray(control_bytes(4))
    with pytest.raises(ConfigError, match=r"host\.region_bytes: 0 slots"):
        format_table(buffer, 0, 4096, 4096, 1)
    with pytest.raises(ConfigError, match="do not fit"):
        format_table(buffer, 4, 4096, 4096, 1)
    with pytest.raises(Corrupt, match="begins with"):
        SlotTable(memoryview(bytearray(8192)))
    with pytest.raises(Corrupt, match="begins with"):
        TableReader(memoryview(bytearray(8192)))


def test_a_small_table_has_its_golden_bytes():
    buffer = blank(4)
    table = SlotTable(memoryview(buffer))
    put(table, 0, key(0), 1, 0xAB)
    put(table, 1, key(1, digest_bytes=16), 2, 0)
    used = bytes(buffer[4096 : 4096 + 2 * RECORD_BYTES])
    bucket = bytes(buffer[buckets_offset(4) : buckets_offset(4) + 128])
    golden = bytes.fromhex((GOLDEN / "slot_table.hex").read_text())
    assert bytes(buffer[:72]) + used + bucket == golden
    assert not any(buffer[72:4096])


def test_reader_answers_hit_pending_and_miss_in_order():
    buffer = blank(64)
    table = SlotTable(memoryview(buffer))
    for number in range(40):
        put(table, number, key(number), 100 + number, 0 if number % 4 == 3 else 5000 + number)
    reader = TableReader(memoryview(buffer).toreadonly())
    asked = [39, 7, 41, 0, 63, 7, 12]
    answer = reader.lookup(NS, [key(number) for number in asked])
    expected = [
        Lookup.MISS if n >= 40 else Lookup.PENDING if n % 4 == 3 else Lookup.HIT for n in asked
    ]
    assert answer.states.tolist() == expected
    for lane, number in enumerate(asked):
        if expected[lane] is Lookup.HIT:
            assert answer.slots[lane] == number
            assert answer.generations[lane] == 100 + number
            assert answer.checksums[lane] == 5000 + number
            assert answer.lengths[lane] == 1000 + number
    assert [a.dtype.name for a in (answer.states, answer.slots, answer.lengths)] == [
        "uint8",
        "int64",
        "int64",
    ]
    assert answer.generations.dtype == answer.checksums.dtype == np.uint64


def test_reader_takes_mixed_key_sizes_no_keys_and_other_namespaces():
    buffer = blank(16)
    table = SlotTable(memoryview(buffer))
    keys = [key(n, digest_bytes=16 if n % 2 else 32) for n in range(8)]
    for slot, chunk in enumerate(keys):
        put(table, slot, chunk, slot + 1, 9)
    reader = TableReader(memoryview(buffer))
    assert reader.lookup(NS, keys).slots.tolist() == list(range(8))
    assert reader.lookup(NS, []).states.tolist() == []
    assert not reader.lookup(NamespaceId(bytes(16)), keys).states.any()
    with pytest.raises(Malformed, match="namespace id"):
        reader.lookup(NamespaceId(b"short"), keys)
    with pytest.raises(Malformed, match="key"):
        reader.lookup(NS, [b"short"])


def test_keys_with_one_tag_are_told_apart_by_their_bytes():
    twins = [make_key(bytes([n]) * 24 + b"same 64b", 0) for n in range(7)]
    assert len(set(tags_of(NS, twins).tolist())) == 1
    buffer = blank(16)
    table = SlotTable(memoryview(buffer))
    for slot, chunk in enumerate(twins[:6]):
        put(table, slot, chunk, slot + 1, 9)
    answer = TableReader(memoryview(buffer)).lookup(NS, twins)
    assert answer.slots.tolist()[:6] == list(range(6))
    assert answer.states.tolist() == [Lookup.HIT] * 6 + [Lookup.MISS]


def test_keys_pushed_past_full_buckets_are_found_until_removed():
    buffer = blank(64)
    table = SlotTable(memoryview(buffer))
    reader = TableReader(memoryview(buffer))
    crowd = [make_key(bytes([n]) * 24 + b"one home", 0) for n in range(30)]
    entries = [put(table, slot, chunk, slot + 1, 9) for slot, chunk in enumerate(crowd)]
    rng = random.Random(3)
    rng.shuffle(entries)
    while entries:
        present = {entry.key for entry in entries}
        states = reader.lookup(NS, crowd).states.tolist()
        assert states == [Lookup.HIT if chunk in present else Lookup.MISS for chunk in crowd]
        gone = entries.pop()
        assert table.index.remove(gone.tag, gone.slot) is Indexed.YES
        assert table.index.remove(gone.tag, gone.slot) is Indexed.ABSENT
    buckets = np.frombuffer(buffer, "<u4", offset=buckets_offset(64)).reshape(-1, 32)
    assert not buckets[:, 1].any()
    assert not buckets[:, 18:26].any()


def test_a_crowded_index_refuses_and_changes_nothing():
    buckets = bytearray(128 * 2 * PROBES_MAX)
    index = KeyIndex(memoryview(buckets))
    for slot in range(8 * PROBES_MAX):
        assert index.insert(5, slot) is Indexed.YES
    before = bytes(buckets)
    assert index.insert(5, 8 * PROBES_MAX) is Indexed.CROWDED
    assert index.remove(5, 8 * PROBES_MAX) is Indexed.ABSENT
    assert bytes(buckets) == before
    index.clear()
    assert index.named() == []
    heads = np.frombuffer(buckets, "<u4").reshape(-1, 32)[:, 0]
    assert not (heads % 2).any()
    assert heads.any()


def test_a_bucket_held_by_a_dead_writer_costs_a_miss_and_no_more():
    buffer = blank(4)
    table = SlotTable(memoryview(buffer))
    put(table, 0, key(0), 1, 9)
    buffer[buckets_offset(4)] |= 1
    assert TableReader(memoryview(buffer)).lookup(NS, [key(0)]).states.tolist() == [Lookup.MISS]


def test_flipped_bits_in_the_index_never_lead_to_another_record():
    buffer = blank(8)
    table = SlotTable(memoryview(buffer))
    keys = [key(number) for number in range(6)]
    for slot, chunk in enumerate(keys):
        put(table, slot, chunk, slot + 1, 9)
    start = buckets_offset(8)
    for bit in range(2 * 128 * 8):
        torn = bytearray(buffer)
        torn[start + bit // 8] ^= 1 << bit % 8
        answer = TableReader(memoryview(torn)).lookup(NS, keys)
        hits = answer.states == Lookup.HIT
        assert (answer.slots[hits] == np.arange(6)[hits]).all()


def test_random_inserts_and_removes_agree_with_a_dict():
    rng = random.Random(11)
    buffer = blank(256)
    table = SlotTable(memoryview(buffer))
    reader = TableReader(memoryview(buffer))
    universe = [key(number) for number in range(400)]
    present: dict[ChunkKey, SlotEntry] = {}
    free = list(range(256))
    for step in range(3000):
        if free and (rng.random() < 0.55 or not present):
            chunk = rng.choice(universe)
            if chunk not in present:
                present[chunk] = put(table, free.pop(), chunk, step + 1, step + 1)
        else:
            gone = present.pop(rng.choice(list(present)))
            table.index.remove(gone.tag, gone.slot)
            table.set_state(gone.slot, SlotState.FREE)
            free.append(gone.slot)
        if step % 100 == 99:
            answer = reader.lookup(NS, universe)
            hits = {
                c: int(g)
                for c, g, s in zip(universe, answer.generations, answer.states, strict=True)
                if s == Lookup.HIT
            }
            assert hits == {chunk: entry.generation for chunk, entry in present.items()}


def test_a_concurrent_reader_never_hits_a_chunk_at_another_record():
    """Two slots are recycled among 64 keys; a record's checksum says which key it is of."""
    buffer = blank(4)
    table = SlotTable(memoryview(buffer))
    reader = TableReader(memoryview(buffer).toreadonly())
    keys = [key(number) for number in range(64)]
    stop = threading.Event()
    wrong: list[str] = []
    seen = [0]

    def read() -> None:
        while not stop.is_set():
            answer = reader.lookup(NS, keys)
            hits = np.flatnonzero(answer.states == Lookup.HIT)
            seen[0] += len(hits)
            wrong.extend(
                f"key {lane} at generation {answer.generations[lane]}"
                for lane in hits
                if (answer.generations[lane] - 1) % 64 != lane
                or answer.checksums[lane] != answer.generations[lane] * 1000 + lane
            )

    thread = threading.Thread(target=read)
    thread.start()
    generation = 0
    held: list[SlotEntry] = []
    while seen[0] < 150 and generation < 200_000:
        if len(held) == 2:
            gone = held.pop(0)
            table.index.remove(gone.tag, gone.slot)
            table.set_state(gone.slot, SlotState.FREE)
        number = generation % 64
        generation += 1
        held.append(put(table, generation % 2, keys[number], generation, 0))
        table.publish(generation % 2, generation * 1000 + number)
    stop.set()
    thread.join()
    assert wrong == []
    assert seen[0] >= 150
