"""Random lives of a directory beside a plain model of what must hold.

The model knows only what callers were told: which references were granted, committed and pinned. It
knows nothing of eviction; when a chunk disappears, the changes must have said so.
"""

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfabric.fabric.types import (
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Released,
    Reserved,
    SlotRef,
    make_key,
)
from kvfabric.tiers.pool.directory import Directory
from kvfabric.tiers.pool.reader import TableReader
from kvfabric.tiers.pool.table import SlotTable, control_bytes, format_table

SLOTS = 12
LEASE_S = 10.0
NAMESPACES = [NamespaceId(bytes([n]) * 16) for n in range(2)]
KEYS = [
    make_key(hashlib.sha256(b"%d" % n).digest()[: 16 if n % 5 == 0 else 32], n % 2)
    for n in range(24)
]
PROCESSES = {"a": (1, 11), "a2": (1, 11), "b": (2, 22), "peer": (0, 0)}
OWNERS = sorted(PROCESSES)
WRITERS = [owner for owner in OWNERS if owner != "peer"]


class Reservation:
    """What a caller knows of a slot that it may still be writing."""

    def __init__(self, owner: str, namespace: NamespaceId, key: ChunkKey) -> None:
        self.owner, self.process = owner, PROCESSES[owner]
        self.namespace, self.key = namespace, key
        self.may_commit = True


class Model:
    """Makes every call on a directory and checks the answer against what was told before."""

    def __init__(self) -> None:
        self.buffer = bytearray(control_bytes(SLOTS))
        format_table(self.buffer, SLOTS, 4096, SLOTS * 4096, 1)
        self.reader = TableReader(memoryview(self.buffer))
        self.d = Directory(SlotTable(memoryview(self.buffer)), quarantine_slots_max=4)
        self.now_s = 0.0
        self.refs: list[SlotRef] = []
        self.generations: set[int] = set()
        self.writing: dict[SlotRef, Reservation] = {}
        self.chunks: dict[SlotRef, tuple[NamespaceId, ChunkKey, int]] = {}
        self.stored: set[tuple[NamespaceId, ChunkKey]] = set()
        self.pins: Counter[tuple[str, SlotRef]] = Counter()
        self.deadlines: dict[str, float] = {}

    def lapse(self) -> None:
        for owner, deadline_s in list(self.deadlines.items()):
            if deadline_s <= self.now_s:
                self.unpin_all(owner)
                self.deadlines[owner] = float("inf")
                if owner == "peer":
                    del self.deadlines[owner]
                for mine in self.writing.values():
                    mine.may_commit &= mine.owner != owner

    def hear(self, owner: str) -> bool:
        self.lapse()
        if owner in self.deadlines:
            self.deadlines[owner] = self.now_s + LEASE_S
        return owner in self.deadlines

    def unpin_all(self, owner: str) -> None:
        for held in [held for held in self.pins if held[0] == owner]:
            del self.pins[held]

    def forget(self, owner: str) -> None:
        self.unpin_all(owner)
        self.deadlines.pop(owner, None)
        for ref in [ref for ref, mine in self.writing.items() if mine.owner == owner]:
            del self.writing[ref]

    def give_up(self, owner: str, ref: SlotRef) -> None:
        mine = self.writing.get(ref)
        if mine is None or owner not in self.deadlines:
            return
        if owner == mine.owner or (not mine.owner and mine.process == PROCESSES[owner]):
            del self.writing[ref]

    def open_owner(self, owner: str) -> None:
        self.lapse()
        self.d.open_owner(owner, LEASE_S, *PROCESSES[owner], self.now_s)
        self.deadlines[owner] = self.now_s + LEASE_S

    def reserve(self, owner: str, namespace: NamespaceId, keys: list[ChunkKey]) -> None:
        known = self.hear(owner)
        depths, lengths = range(len(keys)), [64] * len(keys)
        answers = self.d.reserve(owner, namespace, keys, depths, lengths, self.now_s)
        statuses = [answer.status for answer in answers]
        assert not {Reserved.GRANTED, Reserved.BUSY} <= set(statuses)
        for key, answer in zip(keys, answers, strict=True):
            assert (answer.status is Reserved.PRESENT) is ((namespace, key) in self.stored)
            if answer.status is Reserved.GRANTED:
                assert known
                assert answer.slot.generation not in self.generations
                self.generations.add(answer.slot.generation)
                self.refs.append(answer.slot)
                self.writing[answer.slot] = Reservation(owner, namespace, key)
        fresh = {key for key, status in zip(keys, statuses, strict=True) if status == 0}
        assert len(fresh) == statuses.count(Reserved.GRANTED)

    def commit(self, owner: str, refs: list[SlotRef]) -> None:
        known = self.hear(owner)
        sums = [ref.generation * 10 + 1 for ref in refs]
        answers = self.d.commit(owner, refs, sums, self.now_s)
        for ref, answer, checksum in zip(refs, answers, sums, strict=True):
            mine = self.writing.get(ref)
            if mine is not None:
                good = known and mine.owner == owner and mine.may_commit
                assert (answer is Committed.READY) is good
                if good:
                    self.chunks[ref] = mine.namespace, mine.key, checksum
                self.give_up(owner, ref)
            elif answer is Committed.READY:
                assert ref in self.chunks

    def abort(self, owner: str, refs: list[SlotRef]) -> None:
        self.d.abort(owner, refs)
        for ref in refs:
            self.give_up(owner, ref)

    def pin(self, owner: str, namespace: NamespaceId, keys: list[ChunkKey]) -> None:
        known = self.hear(owner)
        for key, pinned in zip(keys, self.d.pin(owner, namespace, keys, self.now_s), strict=True):
            hit = known and (namespace, key) in self.stored
            assert (pinned.status is Lookup.HIT) is hit
            if hit:
                chunk = pinned.chunk
                assert self.chunks[chunk.slot] == (namespace, key, chunk.checksum)
                self.pins[owner, chunk.slot] += 1

    def release(self, owner: str, refs: list[SlotRef]) -> None:
        self.hear(owner)
        for ref, answer in zip(refs, self.d.release(owner, refs, self.now_s), strict=True):
            assert (answer is Released.HELD) is (self.pins[owner, ref] > 0)
            if answer is Released.HELD:
                self.pins[owner, ref] -= 1

    def drop(self, refs: list[SlotRef]) -> None:
        self.d.drop(refs)

    def retire(self, namespace: NamespaceId) -> None:
        self.d.retire(namespace)
        for mine in self.writing.values():
            mine.may_commit &= mine.namespace != namespace
        assert not [chunk for ns, chunk in self.d.ready_chunks() if ns == namespace]

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.d.expire(self.now_s)
        self.lapse()
        assert self.d.next_deadline_s() == min(self.deadlines.values(), default=float("inf"))

    def owner_gone(self, owner: str) -> None:
        self.d.owner_gone(owner)
        if owner in self.deadlines:
            self.forget(owner)

    def process_gone(self, process: tuple[int, int]) -> None:
        self.d.process_gone(*process)
        for owner in [o for o in self.deadlines if PROCESSES[o] == process]:
            self.forget(owner)
        for ref in [ref for ref, mine in self.writing.items() if mine.process == process]:
            del self.writing[ref]

    def crash(self, alive: set[tuple[int, int]]) -> None:
        before = set(self.stored)
        self.d = Directory(SlotTable(memoryview(self.buffer)), quarantine_slots_max=4)
        adopted = self.d.adopt(lambda pid, started: (pid, started) in alive)
        assert adopted.dropped == 0
        self.deadlines.clear()
        self.pins.clear()
        self.stored.clear()
        for ref, mine in list(self.writing.items()):
            mine.owner, mine.may_commit = "", False
            if mine.process not in alive:
                del self.writing[ref]
        assert {(c.namespace, c.key) for c in self.settle()} == before

    def settle(self):
        """Take the changes, and compare what is told, kept and seen from outside."""
        changes = self.d.take_changes()
        for change in changes:
            place = change.namespace, change.key
            assert (place in self.stored) is not change.stored
            (self.stored.add if change.stored else self.stored.remove)(place)
        self.d.check()
        ready = {(ns, chunk.key): chunk for ns, chunk in self.d.ready_chunks()}
        assert set(ready) == self.stored
        for (namespace, key), chunk in ready.items():
            assert self.chunks[chunk.slot] == (namespace, key, chunk.checksum)
        for namespace in NAMESPACES:
            seen = self.reader.lookup(namespace, KEYS)
            states = seen.states.tolist()
            for lane, key in enumerate(KEYS):
                chunk = ready.get((namespace, key))
                assert (states[lane] == Lookup.HIT) is (chunk is not None)
                if chunk is not None:
                    assert SlotRef(seen.slots[lane], seen.generations[lane]) == chunk.slot
                    assert seen.checksums[lane] == chunk.checksum
        pinned = {ref.slot for (_, ref), count in self.pins.items() if count}
        written = {ref.slot for ref in self.writing}
        taken = pinned | written | {chunk.slot.slot for chunk in ready.values()}
        assert not pinned & written
        assert len(written) == len(self.writing)
        stats = self.d.stats()
        assert stats.pinned == len(pinned)
        assert stats.writing + stats.quarantined >= len(written)
        assert stats.free == SLOTS - len(taken)
        return changes


owners = st.sampled_from(OWNERS)
namespaces = st.sampled_from(NAMESPACES)
batches = st.lists(st.sampled_from(KEYS), max_size=6)
picks = st.lists(st.integers(0, 10_000), min_size=1, max_size=6)


class DirectoryMachine(RuleBasedStateMachine):
    """Hypothesis chooses the calls, and finds the shortest life that breaks a promise."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        for owner in OWNERS:
            self.model.open_owner(owner)

    def some(self, picks: list[int]) -> list[SlotRef]:
        refs = [*self.model.writing, *self.model.refs[-SLOTS:]]
        return [refs[pick % len(refs)] for pick in picks] if refs else []

    @rule(owner=owners)
    def open_owner(self, owner):
        self.model.open_owner(owner)

    @rule(owner=st.sampled_from(WRITERS), namespace=namespaces, keys=batches, commit=st.booleans())
    def reserve(self, owner, namespace, keys, commit):
        before = len(self.model.refs)
        self.model.reserve(owner, namespace, keys)
        if commit:
            self.model.settle()
            self.model.commit(owner, self.model.refs[before:])

    @rule(owner=owners, picks=picks)
    def commit(self, owner, picks):
        self.model.commit(owner, self.some(picks))

    @rule(owner=owners, picks=picks)
    def abort(self, owner, picks):
        self.model.abort(owner, self.some(picks))

    @rule(owner=owners, namespace=namespaces, keys=batches)
    def pin(self, owner, namespace, keys):
        self.model.pin(owner, namespace, keys)

    @rule(owner=owners, picks=picks)
    def release(self, owner, picks):
        self.model.release(owner, self.some(picks))

    @rule(picks=picks)
    def drop(self, picks):
        self.model.drop(self.some(picks))

    @rule(namespace=namespaces)
    def retire(self, namespace):
        self.model.retire(namespace)

    @rule(seconds=st.sampled_from([0.0, 4.0, 6.0, 11.0]))
    def wait(self, seconds):
        self.model.wait(seconds)

    @rule(owner=owners)
    def owner_gone(self, owner):
        self.model.owner_gone(owner)

    @rule(process=st.sampled_from([(1, 11), (2, 22)]))
    def process_gone(self, process):
        self.model.process_gone(process)

    @rule(alive=st.sets(st.sampled_from([(1, 11), (2, 22)])))
    def crash(self, alive):
        self.model.crash(alive)

    @invariant()
    def holds(self):
        self.model.settle()


TestDirectoryMachine = pytest.mark.slow(DirectoryMachine.TestCase)
TestDirectoryMachine.settings = settings(
    deadline=None, max_examples=20, stateful_step_count=30, derandomize=True
)


def live(seed: int, steps: int) -> None:
    """Choose calls with a seeded generator, mostly those of normal operation."""
    rng = random.Random(seed)
    model = Model()

    def some() -> list[SlotRef]:
        known = [*model.writing, *model.refs[-10:]]
        return rng.sample(known, min(len(known), rng.randint(1, 4)))

    calls = [
        (8, lambda: model.open_owner(rng.choice(OWNERS))),
        (20, lambda: reserve(commit=rng.random() < 0.7)),
        (10, lambda: model.commit(rng.choice(WRITERS), some())),
        (5, lambda: model.abort(rng.choice(WRITERS), some())),
        (15, lambda: model.pin(rng.choice(OWNERS), rng.choice(NAMESPACES), batch())),
        (15, lambda: model.release(rng.choice(OWNERS), some())),
        (2, lambda: model.drop(some())),
        (1, lambda: model.retire(rng.choice(NAMESPACES))),
        (8, lambda: model.wait(rng.choice([0.0, 1.0, 3.0, 11.0]))),
        (2, lambda: model.owner_gone(rng.choice(OWNERS))),
        (2, lambda: model.process_gone(rng.choice([(1, 11), (2, 22)]))),
        (1, lambda: model.crash(set(rng.sample([(1, 11), (2, 22)], rng.randint(0, 2))))),
    ]

    def batch() -> list[ChunkKey]:
        return rng.choices(KEYS, k=rng.randint(0, 6))

    def reserve(*, commit: bool) -> None:
        owner, before = rng.choice(WRITERS), len(model.refs)
        model.reserve(owner, rng.choice(NAMESPACES), batch())
        if commit:
            model.settle()
            model.commit(owner, model.refs[before:])

    weights = [weight for weight, _ in calls]
    for _ in range(steps):
        rng.choices(calls, weights)[0][1]()
        model.settle()
        del model.refs[:-500]


@pytest.mark.parametrize("seed", range(3))
def test_a_seeded_life(seed: int):
    live(seed, steps=300)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_a_long_seeded_life(seed: int):
    live(seed, steps=2000)
