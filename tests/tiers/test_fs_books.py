"""The pure parts of the file tier: books, queue and event log."""

import random

from kvfabric.fabric.types import Chunk, ChunkKey, Lookup, NamespaceId, SlotRef
from kvfabric.tiers.base import Job, JobKind
from kvfabric.tiers.fs.index import Claim, Claimed, Entry, FileIndex
from kvfabric.tiers.fs.jobs import MISSED, ActiveJob, Done, JobQueue
from kvfabric.tiers.tier_events import RecordId, TierEventLog

NAMESPACE = NamespaceId(bytes(16))


def record(number: int) -> RecordId:
    return RecordId(NAMESPACE, ChunkKey(number.to_bytes(20, "big")))


def test_the_disk_never_holds_more_than_the_books_say():
    """Random claims, removals that fail, commits and releases, against a disk of our own."""
    for seed in range(20):
        chance = random.Random(seed)
        index = FileIndex(100)
        disk: dict[object, int] = {}
        open_claims: list[tuple[Claim, list[RecordId]]] = []
        for step in range(300):
            action = chance.random()
            if action < 0.4:
                granted = index.claim(record(chance.randrange(30)), chance.randrange(1, 60))
                if granted.case is Claimed.GRANTED:
                    victims = [victim for victim, _ in granted.claim.victims]
                    open_claims.append((granted.claim, victims))
            elif open_claims:
                claim, victims = open_claims.pop(chance.randrange(len(open_claims)))
                if victims:
                    victim = victims.pop()
                    if chance.random() < 0.1:
                        index.stay(victim)
                    else:
                        del disk[victim]
                        index.left_for(claim, victim)
                    open_claims.append((claim, victims))
                elif claim.held_bytes < claim.need_bytes or chance.random() < 0.2:
                    if claim.held_bytes == claim.need_bytes and chance.random() < 0.5:
                        claim.left_path = f"temporary {step}"
                        disk[claim.left_path] = claim.need_bytes
                    index.release(claim)
                else:
                    disk[claim.record] = claim.need_bytes
                    index.commit(claim, Entry(claim.need_bytes))
            elif index.litter:
                path = next(iter(index.litter))
                disk.pop(path, None)
                index.litter_gone(path)
                index.litter_gone(path)
            index.check()
            held = sum(claim.held_bytes for claim, _ in open_claims)
            assert sum(disk.values()) + held == index.used_bytes <= 100


def test_a_claim_evicts_all_that_it_needs_or_nothing():
    index = FileIndex(10)
    for number in range(5):
        granted = index.claim(record(number), 2)
        index.commit(granted.claim, Entry(2))
    assert index.claim(record(9), 11).case is Claimed.NO_ROOM
    assert len(index.present) == 5
    granted = index.claim(record(9), 5)
    assert [victim for victim, _ in granted.claim.victims] == [record(0), record(1), record(2)]
    assert index.claim(record(9), 5).case is Claimed.IN_FLIGHT
    assert index.claim(record(0), 2).case is Claimed.NO_ROOM
    assert index.claim(record(3), 2).case is Claimed.PRESENT
    for victim, _ in granted.claim.victims:
        index.left_for(granted.claim, victim)
    assert (granted.claim.held_bytes, index.used_bytes) == (5, 9)


def active(job_id: int, kind: JobKind, chunks: int, deadline_s: float = 10.0) -> ActiveJob:
    described = tuple(Chunk(record(n).key, SlotRef(n, 1), 4, 1) for n in range(chunks))
    views = (memoryview(bytearray(4)),) * chunks
    job = Job(job_id, kind, NAMESPACE, described, views, deadline_s)
    return ActiveJob(job, 0.0, deadline_s)


def test_loads_go_first_and_jobs_are_shared_head_first():
    queue = JobQueue(threads=3)
    queue.put(active(1, JobKind.STORE, 4))
    queue.put(active(2, JobKind.LOAD, 40))
    queue.put(active(3, JobKind.LOAD, 1))
    order = []
    while queue.has(stores=True):
        run = queue.take()
        order.append((run.active.job.job_id, run.positions))
    assert [job for job, _ in order] == sorted((job for job, _ in order), key=(2, 3, 1).index)
    assert [n for job, run in order if job == 2 for n in run] == list(range(40))
    assert [n for job, run in order if job == 1 for n in run] == list(range(4))
    assert max(len(run) for _, run in order) == 8


def test_what_has_begun_is_not_expired():
    queue = JobQueue(threads=1)
    job = active(1, JobKind.LOAD, 20)
    queue.put(job)
    run = queue.take()
    assert queue.expire(10.0) == []
    assert queue.expire(10.1) == [(job, 12)]
    assert not queue.has(stores=True)
    for position in run.positions:
        assert not job.terminal
        job.decide(position, Done(Lookup.HIT, 7, 4))
        job.decide(position, MISSED)
    result = job.result(11.0)
    assert result.outcomes == (Lookup.HIT,) * 8 + (Lookup.MISS,) * 12
    assert (result.bytes_moved, result.seconds) == (32, 11.0)


def test_the_last_word_on_a_chunk_is_told_in_order():
    log = TierEventLog()
    log.gained(record(1))
    log.gained(record(2))
    log.lost(record(3))
    log.lost(record(1))
    other = RecordId(NamespaceId(bytes([1]) * 16), record(1).key)
    log.lost(other)
    told = [(event.namespace, event.keys, event.removed) for event in log.take()]
    assert told == [
        (NAMESPACE, (record(2).key,), False),
        (NAMESPACE, (record(3).key, record(1).key), True),
        (other.namespace, (other.key,), True),
    ]
    assert log.take() == []


def test_events_that_nobody_takes_are_bounded():
    log = TierEventLog(chunks_max=3)
    for number in range(5):
        log.gained(record(number))
    assert log.dropped == 2
    assert [event.keys for event in log.take()] == [tuple(record(n).key for n in (2, 3, 4))]
