"""The directory's promises, one by one."""

import hashlib
from collections.abc import Sequence
from math import inf

import pytest

from kvfabric.fabric.errors import Conservation, Malformed, Unsupported
from kvfabric.fabric.types import (
    Chunk,
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Released,
    Reserved,
    SlotRef,
    make_key,
)
from kvfabric.tiers.pool import directory as directory_module
from kvfabric.tiers.pool.directory import Directory
from kvfabric.tiers.pool.reader import TableReader
from kvfabric.tiers.pool.table import SlotTable, control_bytes, format_table
from kvfabric.tiers.pool.values import NO_SLOT, Change, Pinned, Reservation

NS = NamespaceId(b"n" * 16)
OTHER = NamespaceId(b"o" * 16)
SLOTS = 8
READY, LOST = Committed.READY, Committed.LOST


def key(number: int) -> ChunkKey:
    return make_key(hashlib.sha256(b"%d" % number).digest(), 0)


def keys(numbers: Sequence[int]) -> list[ChunkKey]:
    return [key(number) for number in numbers]


class Pool:
    """A directory over a bytearray, with owners "a" (pid 1), "b" (pid 2) and "peer" (pid 0)."""

    def __init__(self, slots: int = SLOTS, quarantine: int = SLOTS) -> None:
        self.buffer = bytearray(control_bytes(slots))
        format_table(self.buffer, slots, 4096, slots * 4096, 1)
        self.reader = TableReader(memoryview(self.buffer))
        self.quarantine = quarantine
        self.restart()

    def restart(self) -> None:
        self.d = Directory(SlotTable(memoryview(self.buffer)), quarantine_slots_max=self.quarantine)

    def open_all(self, now_s: float = 0.0) -> None:
        for pid, owner in enumerate(("peer", "a", "b")):
            self.d.open_owner(owner, 10.0, pid, 100 + pid, now_s)

    def reserve(
        self, numbers: Sequence[int], owner: str = "a", now_s: float = 0.0, ns: NamespaceId = NS
    ) -> tuple[Reservation, ...]:
        depths = list(range(len(numbers)))
        return self.d.reserve(owner, ns, keys(numbers), depths, [64] * len(numbers), now_s)

    def store(
        self, numbers: Sequence[int], owner: str = "a", now_s: float = 0.0, ns: NamespaceId = NS
    ) -> list[SlotRef]:
        granted = self.reserve(numbers, owner, now_s, ns)
        assert {r.status for r in granted} == {Reserved.GRANTED}
        refs = [r.slot for r in granted]
        done = self.d.commit(owner, refs, [1000 + n for n in numbers], now_s)
        assert set(done) == {READY}
        return refs

    def pin(self, numbers: Sequence[int], owner: str = "b", now_s: float = 0.0):
        return self.d.pin(owner, NS, keys(numbers), now_s)

    def visible(self, numbers: Sequence[int], ns: NamespaceId = NS) -> list[int]:
        return self.reader.lookup(ns, keys(numbers)).states.tolist()

    def ready(self) -> list[ChunkKey]:
        return [chunk.key for _, chunk in self.d.ready_chunks()]


@pytest.fixture
def pool():
    pool = Pool()
    pool.open_all()
    yield pool
    pool.d.check()


def test_a_chunk_is_pending_then_ready_and_pinned_with_its_facts(pool: Pool):
    granted = pool.reserve([1, 2])
    assert pool.visible([1, 2, 3]) == [Lookup.PENDING, Lookup.PENDING, Lookup.MISS]
    assert [p.status for p in pool.pin([1, 3])] == [Lookup.PENDING, Lookup.MISS]
    assert pool.reserve([1], "b")[0] == Reservation(Reserved.PENDING, NO_SLOT)
    refs = [r.slot for r in granted]
    assert pool.d.commit("a", refs, [11, 12], 0.0) == (READY, READY)
    assert pool.visible([1, 2]) == [Lookup.HIT, Lookup.HIT]
    assert pool.pin([2]) == (Pinned(Lookup.HIT, Chunk(key(2), refs[1], 64, 12)),)
    assert pool.reserve([1])[0] == Reservation(Reserved.PRESENT, NO_SLOT)
    assert pool.d.take_changes() == (Change(NS, key(1), True), Change(NS, key(2), True))
    assert pool.d.take_changes() == ()


def test_a_key_twice_in_a_batch_is_pending_after_the_first(pool: Pool):
    statuses = [r.status for r in pool.reserve([1, 2, 1, 1])]
    assert statuses == [Reserved.GRANTED, Reserved.GRANTED, Reserved.PENDING, Reserved.PENDING]


def test_a_reservation_that_does_not_fit_changes_nothing(pool: Pool):
    pool.store(range(6))
    pool.pin(range(4))
    pool.d.take_changes()
    before = bytes(pool.buffer)
    answers = pool.reserve([0, 10, 11, 12, 13, 14, 10])
    assert [r.status for r in answers] == [Reserved.PRESENT] + [Reserved.BUSY] * 6
    assert bytes(pool.buffer) == before
    assert pool.d.take_changes() == ()
    assert pool.d.stats().busy == 5
    assert {r.status for r in pool.reserve([10, 11, 12, 13])} == {Reserved.GRANTED}


def test_a_reservation_spares_the_chunks_that_it_finds_present(pool: Pool):
    pool.store(range(8))
    answers = pool.reserve([7, *range(20, 27)])
    assert [r.status for r in answers] == [Reserved.PRESENT] + [Reserved.GRANTED] * 7
    assert pool.visible([7, 6]) == [Lookup.HIT, Lookup.MISS]


def test_tails_are_evicted_before_heads_and_evictions_come_before_stores(pool: Pool):
    pool.store([0, 1, 2, 3])
    pool.store([4, 5, 6, 7])
    assert pool.ready() == keys([3, 2, 1, 0, 7, 6, 5, 4])
    pinned = pool.pin([0, 1, 2])
    pool.d.release("b", [p.chunk.slot for p in pinned], 0.0)
    assert pool.ready() == keys([3, 7, 6, 5, 4, 2, 1, 0])
    pool.d.take_changes()
    pool.store([8, 9])
    assert pool.d.take_changes() == (
        Change(NS, key(3), False),
        Change(NS, key(7), False),
        Change(NS, key(8), True),
        Change(NS, key(9), True),
    )
    assert pool.d.stats().evictions == 2


def test_pinned_writing_and_quarantined_slots_are_never_evicted(pool: Pool):
    pool.store([0, 1])
    pool.pin([0], "b", 5.0)
    pool.reserve([2, 3], "b", 5.0)
    pool.reserve([4], "a", 5.0)
    assert pool.d.expire(14.0) == ("peer",)
    pool.d.renew("b", 14.0)
    assert pool.d.expire(15.0) == ("a",)
    assert pool.d.stats().quarantined == 1
    assert {r.status for r in pool.reserve(range(20, 25), "b", 15.0)} == {Reserved.BUSY}
    assert {r.status for r in pool.reserve(range(20, 24), "b", 15.0)} == {Reserved.GRANTED}
    assert pool.visible([0, 1]) == [Lookup.HIT, Lookup.MISS]


def test_a_lease_that_ends_quarantines_until_the_owner_acknowledges(pool: Pool):
    one, two, three = (r.slot for r in pool.reserve([1, 2, 3]))
    assert pool.d.next_deadline_s() == 10.0
    assert set(pool.d.expire(10.0)) == {"a", "b", "peer"}
    assert pool.d.next_deadline_s() == inf
    assert pool.visible([1]) == [Lookup.MISS]
    assert pool.d.stats().quarantined == 3
    assert pool.d.commit("b", [one], [5], 11.0) == (LOST,)
    assert pool.d.stats().quarantined == 3
    assert pool.d.commit("a", [one], [5], 11.0) == (LOST,)
    assert pool.d.stats().quarantined == 2
    pool.d.abort("b", [two])
    assert pool.d.stats().quarantined == 2
    pool.d.abort("a", [two])
    assert pool.d.stats().quarantined == 1
    pool.d.owner_gone("a")
    assert pool.d.stats().free == SLOTS
    assert pool.d.commit("a", [three], [5], 11.0) == (LOST,)
    assert pool.d.take_changes() == ()


def test_a_lease_that_is_over_counts_as_over_before_anybody_looked(pool: Pool):
    ref = pool.reserve([1])[0].slot
    assert pool.d.commit("a", [ref], [5], 10.0) == (LOST,)
    assert pool.d.next_deadline_s() == -inf
    assert "a" in pool.d.expire(10.0)
    assert pool.d.next_deadline_s() == 20.0
    assert pool.d.expire(10.0) == ()


def test_renewing_extends_and_any_call_is_a_sign_of_life(pool: Pool):
    ref = pool.reserve([1])[0].slot
    pool.d.renew("a", 9.0)
    pool.pin([1], "a", 18.0)
    assert pool.d.commit("a", [ref], [5], 27.0) == (READY,)
    assert "a" not in pool.d.expire(36.0)
    assert pool.d.expire(37.0) == ("a",)
    pool.d.renew("a", 40.0)
    assert pool.d.expire(50.0) == ("a",)


def test_pins_are_counted_and_only_the_owners_own_are_released(pool: Pool):
    (ref,) = pool.store([1])
    pool.pin([1, 1], "b")
    pool.pin([1], "peer")
    assert pool.d.stats().pinned == 1
    assert pool.d.release("a", [ref], 0.0) == (Released.LOST,)
    held = pool.d.release("b", [ref, ref, ref], 0.0)
    assert held == (Released.HELD, Released.HELD, Released.LOST)
    assert pool.d.stats().pinned == 1
    assert pool.d.release("peer", [ref], 0.0) == (Released.HELD,)
    assert pool.d.stats().pinned == 0


def test_a_pin_that_expired_is_lost_and_a_grant_is_forgotten(pool: Pool):
    (ref,) = pool.store([1])
    pool.pin([1], "b")
    pool.pin([1], "peer")
    assert "peer" in pool.d.expire(10.0)
    assert pool.d.stats().pinned == 0
    assert pool.d.stats().owners == 2
    assert pool.d.release("b", [ref], 10.0) == (Released.LOST,)
    assert pool.d.release("peer", [ref], 10.0) == (Released.LOST,)
    assert pool.pin([1], "peer", 10.0)[0].status is Lookup.MISS


def test_stale_references_are_lost_and_harm_nothing(pool: Pool):
    (ref,) = pool.store([1])
    stale = [
        SlotRef(ref.slot, ref.generation + 1),
        SlotRef(ref.slot + 1, ref.generation),
        SlotRef(-1, ref.generation),
        SlotRef(10**9, ref.generation),
        NO_SLOT,
    ]
    before = bytes(pool.buffer)
    assert set(pool.d.commit("a", stale, [7] * 5, 0.0)) == {LOST}
    assert set(pool.d.release("a", stale, 0.0)) == {Released.LOST}
    pool.d.abort("a", [*stale, ref])
    pool.d.drop(stale)
    assert bytes(pool.buffer) == before
    assert pool.d.stats().lost == 10


def test_nobody_commits_or_aborts_what_another_is_writing(pool: Pool):
    ref = pool.reserve([1])[0].slot
    assert pool.d.commit("b", [ref], [5], 0.0) == (LOST,)
    pool.d.abort("b", [ref])
    assert pool.d.stats().writing == 1
    assert pool.d.commit("a", [ref], [5], 0.0) == (READY,)


def test_a_commit_may_be_repeated_but_not_changed(pool: Pool):
    (ref,) = pool.store([1])
    assert pool.d.commit("a", [ref, ref], [1001, 5], 0.0) == (READY, LOST)
    assert [chunk.checksum for _, chunk in pool.d.ready_chunks()] == [1001]


def test_generations_never_repeat(pool: Pool):
    seen: set[int] = set()
    for turn in range(30):
        refs = pool.store([100 + 2 * turn, 101 + 2 * turn])
        aborted = [r.slot for r in pool.reserve([7])]
        pool.d.abort("a", aborted)
        for ref in (*refs, *aborted):
            assert ref.generation not in seen
            seen.add(ref.generation)


def test_dropped_chunks_are_found_no_more_and_freed_when_unpinned(pool: Pool):
    refs = pool.store([1, 2])
    pool.pin([1], "b")
    pool.d.take_changes()
    pool.d.drop([*refs, refs[0]])
    assert pool.visible([1, 2]) == [Lookup.MISS, Lookup.MISS]
    assert pool.d.take_changes() == (Change(NS, key(1), False), Change(NS, key(2), False))
    stats = pool.d.stats()
    assert (stats.condemned, stats.dropped, stats.free) == (1, 2, SLOTS - 1)
    again = pool.store([1])
    assert again[0].slot != refs[0].slot
    assert pool.d.release("b", [refs[0]], 0.0) == (Released.HELD,)
    assert pool.d.stats().free == SLOTS - 1
    assert pool.visible([1]) == [Lookup.HIT]


def test_a_retired_namespace_answers_no_more(pool: Pool):
    refs = pool.store([1, 2])
    pool.store([1], ns=OTHER)
    writing = pool.reserve([3])[0].slot
    pool.pin([2], "b")
    pool.d.retire(NS)
    pool.d.retire(NamespaceId(b"x" * 16))
    assert pool.visible([1, 2, 3]) == [Lookup.MISS] * 3
    assert pool.visible([1], OTHER) == [Lookup.HIT]
    assert pool.d.commit("a", [writing], [5], 0.0) == (LOST,)
    assert pool.d.stats().condemned == 1
    assert pool.d.release("b", [refs[1]], 0.0) == (Released.HELD,)
    assert pool.d.stats().free == SLOTS - 1
    assert pool.d.stats().retired == 3
    pool.store([1])


def test_too_many_quarantined_slots_refuse_reservations():
    pool = Pool(quarantine=1)
    pool.open_all()
    one, two = (r.slot for r in pool.reserve([1, 2]))
    pool.d.expire(10.0)
    assert pool.reserve([3], "b", 10.0)[0].status is Reserved.BUSY
    assert pool.reserve([], "b", 10.0) == ()
    pool.d.abort("a", [one])
    assert pool.reserve([3], "b", 10.0)[0].status is Reserved.GRANTED
    assert pool.visible([3]) == [Lookup.PENDING]
    pool.d.abort("a", [two])
    pool.d.check()


def test_a_dead_process_frees_what_all_its_owners_held(pool: Pool):
    pool.d.open_owner("a2", 10.0, 1, 101, 0.0)
    pool.store([9], "b")
    pool.reserve([1], "a")
    pool.reserve([2], "a2")
    pool.pin([9], "a2")
    pool.d.process_gone(0, 100)
    pool.d.process_gone(1, 999)
    assert pool.d.stats().writing == 2
    pool.d.process_gone(1, 101)
    stats = pool.d.stats()
    assert (stats.writing, stats.pinned, stats.owners, stats.free) == (0, 0, 2, SLOTS - 1)


def test_a_name_taken_over_by_another_process_leaves_no_slot_reusable(pool: Pool):
    ref = pool.reserve([1])[0].slot
    pool.d.open_owner("a", 10.0, 77, 1, 0.0)
    assert pool.d.stats().quarantined == 1
    pool.d.abort("a", [ref])
    assert pool.d.stats().quarantined == 1
    pool.d.process_gone(1, 101)
    assert pool.d.stats().free == SLOTS


def test_opening_again_keeps_what_is_held(pool: Pool):
    ref = pool.reserve([1])[0].slot
    pool.d.open_owner("a", 3.0, 1, 101, 0.0)
    assert pool.d.next_deadline_s() == 3.0
    assert pool.d.expire(3.0) == ("a",)
    assert pool.d.commit("a", [ref], [4], 3.0) == (LOST,)


def test_unknown_owners_are_refused(pool: Pool):
    (ref,) = pool.store([1])
    assert pool.reserve([2], "who")[0].status is Reserved.BUSY
    assert pool.pin([1], "who")[0].status is Lookup.MISS
    assert pool.d.commit("who", [ref], [5], 0.0) == (LOST,)
    assert pool.d.release("who", [ref], 0.0) == (Released.LOST,)
    pool.d.abort("who", [ref])
    pool.d.owner_gone("who")
    pool.d.renew("who", 0.0)


def test_an_owner_without_process_may_not_write(pool: Pool):
    with pytest.raises(Unsupported, match="Open it with the pid"):
        pool.reserve([1], "peer")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((NS, [key(1)], [0], [4097]), "4097 bytes for slots of 4096"),
        ((NS, [key(1)], [0], [-1]), "chunks of -1"),
        ((NS, [key(1)], [1 << 32], [1]), "depths"),
        ((NS, [key(1)], [0, 1], [1]), "1 keys, 2 depths, 1 lengths"),
        ((NS, [b"short"], [0], [1]), "key is malformed: 5 bytes"),
        ((b"short", [key(1)], [0], [1]), "namespace id"),
    ],
)
def test_a_batch_that_no_record_could_hold_is_malformed(pool: Pool, args, says):
    before = bytes(pool.buffer)
    with pytest.raises(Malformed, match=says):
        pool.d.reserve("a", *args, 0.0)
    assert bytes(pool.buffer) == before


def test_a_commit_without_checksum_or_owner_without_sense_is_malformed(pool: Pool):
    ref = pool.reserve([1])[0].slot
    for checksums in ([0], [1 << 64], [1, 2]):
        with pytest.raises(Malformed, match="commit"):
            pool.d.commit("a", [ref], checksums, 0.0)
    with pytest.raises(Malformed, match="owner"):
        pool.d.open_owner("c", 1.0, -1, 0, 0.0)
    assert pool.d.commit("a", [ref], [1], 0.0) == (READY,)


def test_changes_that_nobody_takes_stop_reservations(pool: Pool, monkeypatch):
    monkeypatch.setattr(directory_module, "CHANGES_MAX", 3)
    for number in range(4):
        pool.store([number])
    assert pool.reserve([9])[0].status is Reserved.BUSY
    assert len(pool.d.take_changes()) == 4
    assert pool.reserve([9])[0].status is Reserved.GRANTED


def test_chunks_that_the_index_has_no_room_for_are_kept_all_the_same():
    pool = Pool(slots=2048, quarantine=0)
    pool.open_all()
    twins = [make_key(n.to_bytes(24, "big") + b"one home", 0) for n in range(600)]
    granted = pool.d.reserve("a", NS, twins, range(600), [1] * 600, 0.0)
    refs = [r.slot for r in granted]
    assert set(pool.d.commit("a", refs, [1] * 600, 0.0)) == {READY}
    assert pool.d.stats().crowded == 600 - 512
    assert {p.status for p in pool.d.pin("b", NS, twins, 0.0)} == {Lookup.HIT}
    assert pool.reader.lookup(NS, twins).states.sum() == 512
    pool.d.check()
    pool.d.owner_gone("b")
    pool.d.retire(NS)
    pool.d.check()
    assert pool.d.stats().free == 2048


def test_check_notices_books_that_do_not_balance(pool: Pool):
    (ref,) = pool.store([1])
    offset = 4096 + 128 * ref.slot + 120
    kept = pool.buffer[offset]
    pool.buffer[offset] = 0
    with pytest.raises(Conservation, match="table does not balance"):
        pool.d.check()
    pool.buffer[offset] = kept
