"""SimTier against a dict, over disks with all faults; and that it holds the tier contract."""

import os
from dataclasses import replace

import pytest

from kvfabric.fabric.errors import Closed
from kvfabric.fabric.types import Chunk, Lookup, NamespaceId, SlotRef
from kvfabric.tiers.base import Job, JobKind
from kvfabric.tiers.simulation import (
    Disk,
    DiskKnobs,
    LinkKnobs,
    Network,
    Process,
    Recorder,
    SimTier,
    World,
    draw_knobs,
    seeds,
    true_bytes,
    true_checksum,
    true_key,
)

NAMESPACE = NamespaceId(b"n" * 16)
CHUNK_BYTES = 1024
STEPS_MAX = 1_000_000


def make_tier(knobs=None, quota_bytes=1 << 20):
    world = World(1)
    disk = Disk(world, knobs or DiskKnobs(piece_bytes=256))
    return world, disk, SimTier(disk, world, world, quota_bytes=quota_bytes)


def job_of(job_id, kind, numbers, deadline_s=1e9):
    keys = [true_key(number) for number in numbers]
    store = kind is JobKind.STORE
    chunks = tuple(
        Chunk(
            key,
            SlotRef(slot, 1),
            CHUNK_BYTES,
            true_checksum(NAMESPACE, key, CHUNK_BYTES) if store else 0,
        )
        for slot, key in enumerate(keys)
    )
    views = tuple(
        memoryview(bytearray(true_bytes(NAMESPACE, key, CHUNK_BYTES) if store else CHUNK_BYTES))
        for key in keys
    )
    return Job(job_id, kind, NAMESPACE, chunks, views, deadline_s)


def run_job(world, tier, job):
    (tier.submit_store if job.kind is JobKind.STORE else tier.submit_load)(job)
    world.run(world.now_s() + 1000.0, STEPS_MAX)
    (result,) = tier.get_finished_jobs()
    assert result.job_id == job.job_id
    tier.check()
    return result


def test_what_was_stored_loads_with_its_checksum():
    world, disk, tier = make_tier()
    assert set(run_job(world, tier, job_of(1, JobKind.STORE, [1, 2])).outcomes) == {Lookup.HIT}
    load = job_of(2, JobKind.LOAD, [2, 3, 1])
    result = run_job(world, tier, load)
    assert result.outcomes == (Lookup.HIT, Lookup.MISS, Lookup.HIT)
    assert bytes(load.views[0]) == true_bytes(NAMESPACE, true_key(2), CHUNK_BYTES)
    assert result.checksums[0] == true_checksum(NAMESPACE, true_key(2), CHUNK_BYTES)
    assert result.checksums[1] == 0
    assert tier.lookup(NAMESPACE, [true_key(1), true_key(9)]) == [Lookup.HIT, Lookup.MISS]
    disk.check()


def test_a_chunk_being_written_is_pending_and_another_store_of_it_a_miss():
    world, _, tier = make_tier()
    tier.submit_store(job_of(1, JobKind.STORE, [1]))
    tier.submit_store(job_of(2, JobKind.STORE, [1]))
    world.run(0.0005, STEPS_MAX)
    assert tier.lookup(NAMESPACE, [true_key(1)]) == [Lookup.PENDING]
    world.run(10.0, STEPS_MAX)
    outcomes = {result.job_id: result.outcomes for result in tier.get_finished_jobs()}
    assert outcomes == {1: (Lookup.HIT,), 2: (Lookup.MISS,)}


@pytest.mark.parametrize(
    "knobs", [DiskKnobs(torn_share=1.0), DiskKnobs(flip_share=1.0, piece_bytes=100)]
)
def test_corrupt_records_are_a_miss_and_leave_the_tier(knobs):
    world, disk, tier = make_tier(knobs)
    run_job(world, tier, job_of(1, JobKind.STORE, [1]))
    tier.take_events()
    assert run_job(world, tier, job_of(2, JobKind.LOAD, [1])).outcomes == (Lookup.MISS,)
    assert [event.removed for event in tier.take_events()] == [True]
    assert disk.names() == []
    assert tier.stats().used_bytes == 0


@pytest.mark.parametrize("knobs", [DiskKnobs(eio_share=1.0), DiskKnobs(enospc_share=1.0)])
def test_a_store_that_fails_leaves_no_trace(knobs):
    world, disk, tier = make_tier(knobs)
    assert run_job(world, tier, job_of(1, JobKind.STORE, [1])).outcomes == (Lookup.MISS,)
    assert disk.names() == []
    assert tier.take_events() == []


def test_the_quota_evicts_the_least_recently_used():
    world, _, tier = make_tier(quota_bytes=2 * CHUNK_BYTES)
    run_job(world, tier, job_of(1, JobKind.STORE, [1, 2]))
    run_job(world, tier, job_of(2, JobKind.LOAD, [1]))
    run_job(world, tier, job_of(3, JobKind.STORE, [3]))
    keys = [true_key(number) for number in (1, 2, 3)]
    assert tier.lookup(NAMESPACE, keys) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]


def test_a_job_past_its_deadline_is_a_miss():
    world, _, tier = make_tier()
    run_job(world, tier, job_of(1, JobKind.STORE, [1]))
    late = job_of(2, JobKind.LOAD, [1], deadline_s=world.now_s() - 1.0)
    assert run_job(world, tier, late).outcomes == (Lookup.MISS,)


def test_a_full_queue_drops_stores_and_no_loads():
    world, _, tier = make_tier()
    for number in range(100):
        tier.submit_store(job_of(number, JobKind.STORE, [number]))
    for number in range(100):
        tier.submit_load(job_of(1000 + number, JobKind.LOAD, [number]))
    tier.check()
    world.run(1000.0, STEPS_MAX)
    results = {result.job_id: result.outcomes[0] for result in tier.get_finished_jobs()}
    stored = {number for number in range(100) if results[number] is Lookup.HIT}
    loaded = {number for number in range(100) if results[1000 + number] is Lookup.HIT}
    assert 0 < len(stored) < 100
    assert stored == loaded
    tier.check()


def test_drain_ends_every_job_and_touches_no_slot_afterwards():
    world, disk, tier = make_tier()
    tier.submit_store(job_of(1, JobKind.STORE, [1, 2, 3]))
    world.run(0.0011, STEPS_MAX)
    load = job_of(2, JobKind.LOAD, [1, 2, 3])
    tier.submit_load(load)
    tier.drain()
    results = {result.job_id: result.outcomes for result in tier.get_finished_jobs()}
    assert results[1] == (Lookup.HIT,) * 3
    assert set(results) == {1, 2}
    before = [bytes(view) for view in load.views]
    world.run(100.0, STEPS_MAX)
    assert [bytes(view) for view in load.views] == before
    tier.close()
    tier.close()
    with pytest.raises(Closed):
        tier.submit_load(load)
    tier.check()
    disk.check()


class TierProgram:
    """A process that stores and loads at random; its tier must never hand over wrong bytes."""

    def __init__(self, process, disk, recorder, random):
        self.process, self.recorder, self.random = process, recorder, random
        self.tier = SimTier(disk, process, process.clock, quota_bytes=12 * CHUNK_BYTES)
        self.jobs, self.count = {}, 0

    def on_message(self, source, frame):
        pass

    def tick(self):
        self.tier.check()
        for result in self.tier.get_finished_jobs():
            job, request = self.jobs.pop(result.job_id)
            if request:
                self.recorder.end(request)
            for chunk, view, outcome in zip(job.chunks, job.views, result.outcomes, strict=True):
                if job.kind is JobKind.LOAD and outcome is Lookup.HIT:
                    self.recorder.hit(self.process.name, NAMESPACE, chunk.key, view)
                elif job.kind is JobKind.LOAD:
                    self.recorder.misses += 1
        if not self.recorder.world.now_s() < 60.0:
            return
        kind = self.random.choice((JobKind.STORE, JobKind.LOAD))
        numbers = [self.random.randrange(20) for _ in range(self.random.randint(1, 4))]
        self.count += 1
        deadline_s = self.process.clock.now_s() + 1.0
        job = job_of(self.process.epoch * 10_000 + self.count, kind, dict.fromkeys(numbers))
        job = replace(job, deadline_s=deadline_s)
        if kind is JobKind.STORE:
            for chunk in job.chunks:
                self.recorder.commit(NAMESPACE, chunk.key)
            self.scribble(job)
        self.jobs[job.job_id] = job, None
        (self.tier.submit_store if kind is JobKind.STORE else self.tier.submit_load)(job)

    def scribble(self, job):
        """Break the rule that a slot is pinned during its job, now and then: a late writer."""
        if self.random.random() < 0.2:
            view = job.views[0]
            self.process.dma(
                self.random.expovariate(20.0), lambda: view.__setitem__(slice(0, 9), b"scribbled")
            )


def run_tier_world(seed):
    with World(seed) as world:
        knobs = draw_knobs(world.fork("knobs"), chunk_bytes=CHUNK_BYTES)
        network, recorder = Network(world, LinkKnobs()), Recorder(world)
        disk, random = Disk(world, knobs.disk), world.fork("load")
        process = Process(
            world, network, "node", lambda p: TierProgram(p, disk, recorder, random), tick_s=0.05
        )
        process.start()
        for at_s in (15.0, 30.0):
            world.at(at_s, process.kill)
            world.at(at_s + 1.0, process.start)
        world.watch("disk", disk.check, every_steps=16)
        world.run(60.0, STEPS_MAX)
        disk.calm()
        world.run(400.0, STEPS_MAX)
        assert process.program.jobs == {}
        process.program.tier.check()
        return recorder.hits


def test_a_tier_never_hands_over_wrong_bytes():
    hits = [run_tier_world(seed) for seed in seeds(3, os.environ)]
    assert sum(hits) > 100


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_tier_never_hands_over_wrong_bytes_for_long():
    for seed in seeds(200, os.environ, first=1000):
        run_tier_world(seed)
