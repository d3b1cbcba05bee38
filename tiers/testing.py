"""The suite that every tier must pass, for authors of tiers in this package and outside it.

Subclass `TierContract` in a test module, under a name that pytest collects, and say how to make a
tier and how to damage a chunk at rest:

    class TestMyTier(TierContract):
        def make_tier(self, tmp_path, clock, quota_bytes):
            return MyTier(tmp_path, clock, quota_bytes)

        def corrupt(self, tier, namespace, key):
            ...

Every test ends with `check`, `close` and a count of results. A tier with threads is waited for with
`drain` alone; the clock is turned by hand and never runs.
"""

import mmap
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..fabric.checksum import checksum
from ..fabric.errors import Closed
from ..fabric.file_record import padded_bytes
from ..fabric.types import Chunk, ChunkKey, Lookup, NamespaceId, SlotRef, make_key
from .base import Job, JobKind, JobResult, Tier
from .testing_wrappers import Fault, FaultyTier, ManualClock, SlowTier

__all__ = ["Fault", "FaultyTier", "ManualClock", "Rig", "SlowTier", "TierContract"]

NAMESPACE = NamespaceId(bytes(range(16)))
OTHER_NAMESPACE = NamespaceId(bytes(range(16, 32)))
HIT, MISS = Lookup.HIT, Lookup.MISS
DEADLINE_S = 20.0


def key(number: int, *, digest_bytes: int = 32) -> ChunkKey:
    """Return the key with that number."""
    return make_key(number.to_bytes(digest_bytes, "little"), number % 3)


def payload(number: int, length_bytes: int) -> bytes:
    """Return the bytes of the chunk with that number."""
    return random.Random(number).randbytes(length_bytes)


def page_aligned(content: bytes) -> memoryview:
    """Return a slot that holds these bytes, as the pool's region would lie in memory."""
    view = memoryview(mmap.mmap(-1, max(1, padded_bytes(len(content)))))[: len(content)]
    view[:] = content
    return view


class Rig:
    """A tier under test, the clock in its hand, and helpers that wait for results."""

    def __init__(self, tier: Tier, clock: ManualClock) -> None:
        self.tier = tier
        self.clock = clock
        self.contents: OrderedDict[tuple[NamespaceId, ChunkKey], None] = OrderedDict()
        """What the events taken so far say that the tier has."""
        self._submitted: dict[int, int] = {}
        self._results: dict[int, JobResult] = {}

    def submit(
        self,
        kind: JobKind,
        chunks: Sequence[tuple[ChunkKey, memoryview]],
        *,
        namespace: NamespaceId = NAMESPACE,
        deadline_s: float = DEADLINE_S,
        checksums: Sequence[int] = (),
    ) -> int:
        """Submit a job whose deadline is `deadline_s` from now; return its id."""
        job_id = len(self._submitted)
        if kind is JobKind.STORE and not checksums:
            checksums = [checksum(view) for _, view in chunks]
        sums = checksums or [0] * len(chunks)
        described = tuple(
            Chunk(name, SlotRef(slot, 1), view.nbytes, sums[slot])
            for slot, (name, view) in enumerate(chunks)
        )
        views = tuple(view for _, view in chunks)
        job = Job(job_id, kind, namespace, described, views, self.clock.now_s() + deadline_s)
        (self.tier.submit_store if kind is JobKind.STORE else self.tier.submit_load)(job)
        self._submitted[job_id] = len(chunks)
        return job_id

    def collect(self) -> None:
        """Take what has finished; a result must be of a submitted job and new."""
        for result in self.tier.get_finished_jobs():
            assert result.job_id in self._submitted, f"job {result.job_id} was never submitted"
            assert result.job_id not in self._results, f"job {result.job_id} surfaced twice"
            assert len(result.outcomes) == self._submitted[result.job_id]
            assert len(result.checksums) == self._submitted[result.job_id]
            for outcome, digest in zip(result.outcomes, result.checksums, strict=True):
                assert outcome in (HIT, MISS)
                assert (digest != 0) == (outcome is HIT)
            self._results[result.job_id] = result

    def finish(self, job_id: int) -> JobResult:
        """Drain, and return the job's result."""
        self.tier.drain()
        self.collect()
        return self._results[job_id]

    def store(self, *numbers: int, length_bytes: int = 5000) -> JobResult:
        """Store chunks by number, in one job, and wait."""
        chunks = [(key(n), page_aligned(payload(n, length_bytes))) for n in numbers]
        return self.finish(self.submit(JobKind.STORE, chunks))

    def load(self, *numbers: int, length_bytes: int = 5000) -> JobResult:
        """Load chunks by number, in one job, wait, and compare every HIT with what was stored."""
        chunks = [(key(n), page_aligned(bytes(length_bytes))) for n in numbers]
        result = self.finish(self.submit(JobKind.LOAD, chunks))
        for number, (_, view), outcome in zip(numbers, chunks, result.outcomes, strict=True):
            if outcome is HIT:
                assert view == payload(number, length_bytes), f"wrong bytes of chunk {number}"
        return result

    def lookup(self, *numbers: int) -> list[Lookup]:
        """Look chunks up by number."""
        return list(self.tier.lookup(NAMESPACE, [key(number) for number in numbers]))

    def settle(self) -> None:
        """Wait until the tier knows what it has: a job of an unknown chunk is answered then."""
        self.load(1 << 40)

    def follow_events(self) -> list[tuple[ChunkKey, bool]]:
        """Take the events, apply them to `contents`, and return (key, removed) in order."""
        told: list[tuple[ChunkKey, bool]] = []
        for event in self.tier.take_events():
            for name in event.keys:
                told.append((name, event.removed))
                if event.removed:
                    self.contents.pop((event.namespace, name), None)
                else:
                    self.contents[event.namespace, name] = None
        return told

    def assert_all_surfaced(self) -> None:
        """Check that every submitted job has surfaced."""
        self.collect()
        assert set(self._results) == set(self._submitted)


class TierContract(ABC):
    """What every tier promises. Chunks are 5000 bytes unless a test says otherwise."""

    @abstractmethod
    def make_tier(self, tmp_path: Path, clock: ManualClock, quota_bytes: int) -> Tier:
        """Return a new tier; in one test it may be called again for the same directory."""

    @abstractmethod
    def corrupt(self, tier: Tier, namespace: NamespaceId, key: ChunkKey) -> None:
        """Change a bit of a stored chunk behind the tier's back."""

    def occupied_bytes(self, length_bytes: int) -> int:
        """Return what a chunk of that length counts against the quota."""
        return length_bytes

    @contextmanager
    def rig(self, tmp_path: Path, quota_chunks: int = 8) -> Generator[Rig, None, None]:
        """Yield a rig around a new tier with room for that many chunks; check it at the end."""
        clock = ManualClock()
        tier = self.make_tier(tmp_path, clock, quota_chunks * self.occupied_bytes(5000))
        rig = Rig(tier, clock)
        try:
            rig.settle()
            yield rig
            tier.drain()
            rig.assert_all_surfaced()
            tier.check()
        finally:
            tier.close()

    def test_what_was_stored_is_loaded_exactly(self, tmp_path: Path) -> None:
        """Bytes and checksums are those of the slots."""
        with self.rig(tmp_path) as rig:
            stored = rig.store(1, 2, 3)
            assert stored.outcomes == (HIT,) * 3
            loaded = rig.load(3, 1, 2)
            assert loaded.outcomes == (HIT,) * 3
            assert loaded.checksums == tuple(checksum(payload(n, 5000)) for n in (3, 1, 2))
            assert sorted(stored.checksums) == sorted(loaded.checksums)

    def test_every_length_comes_back(self, tmp_path: Path) -> None:
        """Around the edges of blocks and checksum pieces."""
        with self.rig(tmp_path, quota_chunks=400) as rig:
            for number, length in enumerate((1, 511, 512, 4095, 4096, 4097, 8192, 65536, 65537)):
                assert rig.store(number, length_bytes=length).outcomes == (HIT,)
                assert rig.load(number, length_bytes=length).outcomes == (HIT,)

    def test_slots_need_not_be_aligned(self, tmp_path: Path) -> None:
        """A view may begin anywhere."""
        with self.rig(tmp_path) as rig:
            content = payload(1, 8192)
            source = page_aligned(b"x" + content)[1:]
            rig.finish(rig.submit(JobKind.STORE, [(key(1), source)]))
            target = page_aligned(bytes(8195))[3:]
            result = rig.finish(rig.submit(JobKind.LOAD, [(key(1), target)]))
            assert result.outcomes == (HIT,)
            assert target == content

    def test_slots_may_be_read_only_for_a_store(self, tmp_path: Path) -> None:
        """A store does not write to the slot."""
        with self.rig(tmp_path) as rig:
            view = page_aligned(payload(1, 5000)).toreadonly()
            result = rig.finish(rig.submit(JobKind.STORE, [(key(1), view)]))
            assert result.outcomes == (HIT,)
            assert rig.load(1).outcomes == (HIT,)

    def test_the_tier_has_a_copy(self, tmp_path: Path) -> None:
        """What the pool writes into the slot afterwards does not show."""
        with self.rig(tmp_path) as rig:
            view = page_aligned(payload(1, 5000))
            rig.finish(rig.submit(JobKind.STORE, [(key(1), view)]))
            view[:] = bytes(5000)
            assert rig.load(1).outcomes == (HIT,)

    def test_absent_is_miss(self, tmp_path: Path) -> None:
        """To a lookup and to a load."""
        with self.rig(tmp_path) as rig:
            assert rig.lookup(1) == [MISS]
            result = rig.load(1)
            assert result.outcomes == (MISS,)
            assert result.bytes_moved == 0

    def test_lookup_answers_in_order(self, tmp_path: Path) -> None:
        """One answer for each key asked, repeated ones too."""
        with self.rig(tmp_path) as rig:
            rig.store(2, 4)
            assert rig.lookup(1, 2, 3, 4, 2, 5) == [MISS, HIT, MISS, HIT, HIT, MISS]
            assert rig.lookup() == []

    def test_a_job_may_be_served_in_part(self, tmp_path: Path) -> None:
        """Chunk by chunk."""
        with self.rig(tmp_path) as rig:
            rig.store(1, 3)
            result = rig.load(1, 2, 3, 4)
            assert result.outcomes == (HIT, MISS, HIT, MISS)
            assert result.bytes_moved == 2 * 5000

    def test_a_job_of_nothing_surfaces(self, tmp_path: Path) -> None:
        """With no outcomes."""
        with self.rig(tmp_path) as rig:
            assert rig.store().outcomes == ()
            assert rig.load().outcomes == ()

    def test_storing_again_is_a_hit_that_moves_nothing(self, tmp_path: Path) -> None:
        """Chunks that the tier has are skipped."""
        with self.rig(tmp_path) as rig:
            first = rig.store(1)
            again = rig.store(1)
            assert again.outcomes == (HIT,)
            assert again.checksums == first.checksums
            assert (first.bytes_moved, again.bytes_moved) == (5000, 0)
            assert rig.tier.stats().chunks == 1

    def test_a_chunk_twice_in_one_job(self, tmp_path: Path) -> None:
        """Is stored once and a HIT both times."""
        with self.rig(tmp_path) as rig:
            assert rig.store(1, 1, 2, 1).outcomes == (HIT,) * 4
            assert rig.tier.stats().chunks == 2
            assert rig.load(1, 1).outcomes == (HIT, HIT)

    def test_the_same_chunk_in_many_jobs_at_once(self, tmp_path: Path) -> None:
        """Every job gets its HIT; the chunk is there once."""
        with self.rig(tmp_path) as rig:
            chunks = [(key(n), page_aligned(payload(n, 5000))) for n in range(4)]
            jobs = [rig.submit(JobKind.STORE, chunks) for _ in range(6)]
            assert all(rig.finish(job).outcomes == (HIT,) * 4 for job in jobs)
            assert rig.tier.stats().used_bytes == 4 * self.occupied_bytes(5000)

    def test_namespaces_are_apart(self, tmp_path: Path) -> None:
        """The same key in another namespace is another chunk."""
        with self.rig(tmp_path) as rig:
            rig.store(1)
            assert list(rig.tier.lookup(OTHER_NAMESPACE, [key(1)])) == [MISS]
            other = page_aligned(payload(77, 5000))
            store = rig.submit(JobKind.STORE, [(key(1), other)], namespace=OTHER_NAMESPACE)
            rig.finish(store)
            target = page_aligned(bytes(5000))
            load = rig.submit(JobKind.LOAD, [(key(1), target)], namespace=OTHER_NAMESPACE)
            assert rig.finish(load).outcomes == (HIT,)
            assert target == payload(77, 5000)
            assert rig.load(1).outcomes == (HIT,)

    def test_keys_of_both_lengths(self, tmp_path: Path) -> None:
        """Digests of 16 and of 32 bytes."""
        with self.rig(tmp_path) as rig:
            for digest_bytes in (16, 32):
                name = key(9, digest_bytes=digest_bytes)
                view = page_aligned(payload(9, 5000))
                rig.finish(rig.submit(JobKind.STORE, [(name, view)]))
                target = page_aligned(bytes(5000))
                result = rig.finish(rig.submit(JobKind.LOAD, [(name, target)]))
                assert result.outcomes == (HIT,)
                assert target == view

    def test_another_length_is_a_miss_and_does_no_harm(self, tmp_path: Path) -> None:
        """The chunk stays."""
        with self.rig(tmp_path) as rig:
            rig.store(1)
            assert rig.load(1, length_bytes=4999).outcomes == (MISS,)
            assert rig.load(1, length_bytes=9000).outcomes == (MISS,)
            assert rig.load(1).outcomes == (HIT,)

    def test_drain_makes_everything_terminal(self, tmp_path: Path) -> None:
        """And the results still surface, each once."""
        with self.rig(tmp_path) as rig:
            jobs = [
                rig.submit(JobKind.STORE, [(key(n), page_aligned(payload(n, 5000)))])
                for n in range(8)
            ]
            rig.tier.drain()
            rig.collect()
            assert all(rig.finish(job).outcomes == (HIT,) for job in jobs)
            assert not list(rig.tier.get_finished_jobs())

    def test_close_twice(self, tmp_path: Path) -> None:
        """The second does nothing; results from before still surface; new jobs are refused."""
        with self.rig(tmp_path) as rig:
            chunks = [(key(1), page_aligned(payload(1, 5000)))]
            job = rig.submit(JobKind.STORE, chunks)
            rig.tier.close()
            rig.tier.close()
            rig.collect()
            assert rig.finish(job).outcomes == (HIT,)
            for kind in JobKind:
                try:
                    rig.submit(kind, chunks)
                except Closed:
                    continue
                raise AssertionError("a closed tier took a job")

    def test_the_quota_holds_at_every_step(self, tmp_path: Path) -> None:
        """The newest chunk is always there."""
        with self.rig(tmp_path, quota_chunks=5) as rig:
            for number in range(20):
                assert rig.store(number).outcomes == (HIT,)
                stats = rig.tier.stats()
                assert stats.used_bytes <= stats.quota_bytes
                assert stats.chunks == min(number + 1, 5)
                assert rig.lookup(number) == [HIT]
                rig.tier.check()

    def test_a_job_beyond_the_quota(self, tmp_path: Path) -> None:
        """Keeps what fits; nothing breaks."""
        with self.rig(tmp_path, quota_chunks=5) as rig:
            rig.store(*range(17))
            assert rig.tier.stats().chunks <= 5
            rig.load(*range(17))

    def test_a_chunk_larger_than_the_quota(self, tmp_path: Path) -> None:
        """Is a MISS and drives nothing out."""
        with self.rig(tmp_path, quota_chunks=2) as rig:
            rig.store(1, 2)
            assert rig.store(3, length_bytes=100_000).outcomes == (MISS,)
            assert rig.load(1, 2).outcomes == (HIT, HIT)

    def test_evictions_are_told(self, tmp_path: Path) -> None:
        """An event for every chunk that went."""
        with self.rig(tmp_path, quota_chunks=3) as rig:
            rig.store(1, 2, 3)
            rig.follow_events()
            rig.store(4, 5)
            told = rig.follow_events()
            gone = {name for name, removed in told if removed}
            absent = {key(n) for n in range(1, 6) if rig.lookup(n) == [MISS]}
            assert len(gone) == 2
            assert gone == absent

    def test_events_are_the_contents(self, tmp_path: Path) -> None:
        """Replayed in order they say what lookup says."""
        with self.rig(tmp_path, quota_chunks=4) as rig:
            chance = random.Random(5)
            for _ in range(30):
                rig.store(*(chance.randrange(12) for _ in range(3)))
                if chance.random() < 0.5:
                    rig.follow_events()
            rig.follow_events()
            for number in range(12):
                expected = HIT if (NAMESPACE, key(number)) in rig.contents else MISS
                assert rig.lookup(number) == [expected]
            assert not list(rig.tier.take_events())

    def test_usage_is_exact(self, tmp_path: Path) -> None:
        """The sum over the contents, by an account of our own."""
        with self.rig(tmp_path, quota_chunks=100) as rig:
            oracle: dict[int, int] = {}
            chance = random.Random(6)
            for _ in range(30):
                number = chance.randrange(20)
                length = 1000 * (number + 1)
                rig.store(number, length_bytes=length)
                oracle[number] = self.occupied_bytes(length)
                stats = rig.tier.stats()
                assert (stats.used_bytes, stats.chunks) == (sum(oracle.values()), len(oracle))

    def test_a_late_store_stores_nothing(self, tmp_path: Path) -> None:
        """Past its deadline what has not begun is MISS."""
        with self.rig(tmp_path) as rig:
            chunks = [(key(n), page_aligned(payload(n, 5000))) for n in (1, 2)]
            job = rig.submit(JobKind.STORE, chunks, deadline_s=-1.0)
            assert rig.finish(job).outcomes == (MISS, MISS)
            assert rig.lookup(1, 2) == [MISS, MISS]
            assert rig.tier.stats().used_bytes == 0

    def test_a_late_load_is_a_miss(self, tmp_path: Path) -> None:
        """And the chunk stays."""
        with self.rig(tmp_path) as rig:
            rig.store(1)
            target = page_aligned(bytes(5000))
            job = rig.submit(JobKind.LOAD, [(key(1), target)], deadline_s=-1.0)
            assert rig.finish(job).outcomes == (MISS,)
            assert rig.load(1).outcomes == (HIT,)

    def test_a_corrupt_chunk_is_a_miss_and_forgotten(self, tmp_path: Path) -> None:
        """Told as an event, freed, and its neighbours unharmed."""
        with self.rig(tmp_path) as rig:
            rig.store(1, 2)
            rig.follow_events()
            self.corrupt(rig.tier, NAMESPACE, key(1))
            assert rig.load(1, 2).outcomes == (MISS, HIT)
            assert rig.lookup(1, 2) == [MISS, HIT]
            assert rig.follow_events() == [(key(1), True)]
            assert rig.tier.stats().used_bytes == self.occupied_bytes(5000)
            assert rig.tier.stats().counters["corrupt"] == 1

    def test_a_corrupt_chunk_can_be_stored_again(self, tmp_path: Path) -> None:
        """After the miss."""
        with self.rig(tmp_path) as rig:
            rig.store(1)
            self.corrupt(rig.tier, NAMESPACE, key(1))
            rig.load(1)
            result = rig.store(1)
            assert (result.outcomes, result.bytes_moved) == ((HIT,), 5000)
            assert rig.load(1).outcomes == (HIT,)

    def test_bytes_that_differ_from_their_checksum_are_never_handed_over(
        self, tmp_path: Path
    ) -> None:
        """A slot that changed between its checksum and the copy is found out at the load."""
        with self.rig(tmp_path) as rig:
            view = page_aligned(payload(1, 5000))
            rig.finish(rig.submit(JobKind.STORE, [(key(1), view)], checksums=[12345]))
            assert rig.load(1).outcomes == (MISS,)
            assert rig.lookup(1) == [MISS]

    def test_many_jobs_interleaved(self, tmp_path: Path) -> None:
        """Random stores and loads without waiting between them, against a dictionary of bytes."""
        for seed in range(3):
            with self.rig(tmp_path / str(seed), quota_chunks=6) as rig:
                chance = random.Random(seed)
                loads: list[tuple[int, int, memoryview]] = []
                for _ in range(60):
                    number = chance.randrange(14)
                    if chance.random() < 0.5:
                        source = page_aligned(payload(number, 5000))
                        rig.submit(JobKind.STORE, [(key(number), source)])
                    else:
                        target = page_aligned(bytes(5000))
                        job = rig.submit(JobKind.LOAD, [(key(number), target)])
                        loads.append((job, number, target))
                    if chance.random() < 0.2:
                        rig.collect()
                        rig.tier.check()
                for job, number, target in loads:
                    if rig.finish(job).outcomes == (HIT,):
                        assert target == payload(number, 5000)
                rig.follow_events()
                stats = rig.tier.stats()
                assert stats.chunks == len(rig.contents)
                assert stats.used_bytes == stats.chunks * self.occupied_bytes(5000)

    def test_faults_and_delays_stay_within_the_contract(self, tmp_path: Path) -> None:
        """The wrappers around this tier: every job surfaces, late or failed."""
        for fault in Fault:
            with self.rig(tmp_path / fault.value) as rig:
                inner = rig.tier
                faulty = FaultyTier(inner, 2, fault)
                rig.tier = SlowTier(faulty, rig.clock, 3.0)
                outcomes = [rig.store(number, number + 10).outcomes for number in (1, 2, 3)]
                failed = (MISS, MISS) if fault is Fault.JOB else (HIT, MISS)
                assert outcomes == [(HIT, HIT), failed, (HIT, HIT)]
                assert faulty.faults == 1
                rig.submit(JobKind.LOAD, [(key(1), page_aligned(bytes(5000)))])
                inner.drain()
                assert not list(rig.tier.get_finished_jobs())
                rig.clock.sleep_s(3.0)
                rig.collect()
                rig.assert_all_surfaced()
