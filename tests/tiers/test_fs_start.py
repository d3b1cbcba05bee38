"""The file tier at its start: the scan, recency, sweeping, quota, and neighbours."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvfabric.fabric.config import FileTierConfig, MemoryTierConfig
from kvfabric.fabric.file_record import record_bytes
from kvfabric.fabric.types import Lookup
from kvfabric.tiers.base import JobKind
from kvfabric.tiers.factory import make_tier
from kvfabric.tiers.fs import FileOps, FileTier, IoMode
from kvfabric.tiers.memory import MemoryTier
from kvfabric.tiers.testing import (
    HIT,
    MISS,
    NAMESPACE,
    ManualClock,
    Rig,
    key,
    page_aligned,
    payload,
)

RECORD = record_bytes(5000)


class GatedOps(FileOps):
    """Lists no directory until the gate is opened."""

    def __init__(self):
        self.gate = threading.Event()

    def list_directory(self, path: str):
        assert self.gate.wait(20)
        return super().list_directory(path)


def open_rig(root: Path, chunks: int = 8, ops: FileOps | None = None, **settings: int) -> Rig:
    clock = ManualClock()
    config = FileTierConfig(root_dir=str(root), quota_bytes=chunks * RECORD, **settings)
    return Rig(FileTier(config, clock, ops=ops), clock)


def make_rig(root: Path, chunks: int = 8, **settings: int) -> Rig:
    rig = open_rig(root, chunks, **settings)
    rig.settle()
    return rig


def close(rig: Rig) -> None:
    rig.tier.drain()
    rig.assert_all_surfaced()
    rig.tier.check()
    assert rig.tier.stats().counters["internal_errors"] == 0
    rig.tier.close()


def file_of(root: Path, number: int) -> Path:
    name = key(number).hex()
    return root / NAMESPACE.hex() / name[:2] / f"{name}.kv"


def test_a_restart_serves_everything(tmp_path):
    rig = make_rig(tmp_path)
    rig.store(*range(8))
    close(rig)
    rig = make_rig(tmp_path)
    assert rig.lookup(*range(8)) == [HIT] * 8
    rig.follow_events()
    assert len(rig.contents) == 8
    assert rig.tier.stats().used_bytes == 8 * RECORD
    stored = rig.store(3)
    assert (stored.outcomes, stored.bytes_moved) == ((HIT,), 0)
    assert stored.checksums == rig.load(3).checksums
    assert rig.load(*range(8)).outcomes == (HIT,) * 8
    close(rig)


def test_recency_survives_a_restart(tmp_path):
    rig = make_rig(tmp_path)
    rig.store(*range(8))
    close(rig)
    for number, age_s in enumerate((5, 3, 8, 1, 7, 2, 6, 4)):
        os.utime(file_of(tmp_path, number), ns=(0, 10**18 - age_s * 10**9))
    rig = make_rig(tmp_path)
    rig.load(2)
    rig.store(100, 101, 102)
    assert [n for n in range(8) if rig.lookup(n) == [MISS]] == [0, 4, 6]
    close(rig)
    rig = make_rig(tmp_path, chunks=4)
    assert [n for n in (*range(8), 100, 101, 102) if rig.lookup(n) == [HIT]] == [2, 100, 101, 102]
    close(rig)


def test_a_lowered_quota_is_reached_before_anything_is_served(tmp_path):
    rig = make_rig(tmp_path)
    rig.store(*range(8))
    close(rig)
    rig = make_rig(tmp_path, chunks=3)
    assert rig.tier.stats().used_bytes == 3 * RECORD
    assert len(list(tmp_path.rglob("*.kv"))) == 3
    assert rig.tier.stats().counters["evicted"] == 5
    rig.follow_events()
    assert len(rig.contents) == 3
    close(rig)


def test_a_file_known_by_name_only_that_is_bad_is_stored_again(tmp_path):
    rig = make_rig(tmp_path)
    rig.store(1, 2)
    close(rig)
    file_of(tmp_path, 1).write_bytes(bytes(RECORD))
    rig = make_rig(tmp_path)
    file_of(tmp_path, 2).unlink()
    stored = rig.store(1, 2)
    assert (stored.outcomes, stored.bytes_moved) == ((HIT, HIT), 10_000)
    assert rig.load(1, 2).outcomes == (HIT, HIT)
    assert rig.tier.stats().used_bytes == 2 * RECORD
    close(rig)


def test_what_cannot_be_a_record_is_removed_and_strangers_are_left(tmp_path):
    rig = make_rig(tmp_path)
    rig.store(1, 2)
    close(rig)
    os.truncate(file_of(tmp_path, 1), 5000)
    strangers = [tmp_path / "README", file_of(tmp_path, 2).parent / "notes.txt", tmp_path / "x.tmp"]
    for stranger in strangers:
        stranger.write_text("mine")
    (tmp_path / "lost+found").mkdir()
    rig = make_rig(tmp_path)
    assert rig.lookup(1, 2) == [MISS, HIT]
    assert not file_of(tmp_path, 1).exists()
    assert rig.tier.stats().used_bytes == RECORD
    assert all(stranger.exists() for stranger in strangers)
    close(rig)


def test_lookup_is_pending_while_the_scan_runs_and_then_a_miss(tmp_path):
    ops = GatedOps()
    rig = open_rig(tmp_path, ops=ops)
    assert rig.lookup(1, 2) == [Lookup.PENDING] * 2
    rig.clock.sleep_s(10.1)
    assert rig.lookup(1, 2) == [MISS] * 2
    ops.gate.set()
    rig.settle()
    assert rig.lookup(1) == [MISS]
    close(rig)


def test_deadlines_hold_while_the_scan_runs(tmp_path):
    ops = GatedOps()
    rig = open_rig(tmp_path, ops=ops, job_deadline_s=5)
    view = page_aligned(payload(1, 5000))
    soon = rig.submit(JobKind.LOAD, [(key(1), view)], deadline_s=1.0)
    late = rig.submit(JobKind.STORE, [(key(1), view)], deadline_s=100.0)
    rig.collect()
    assert not rig._results
    rig.clock.sleep_s(1.1)
    rig.collect()
    assert set(rig._results) == {soon}
    rig.clock.sleep_s(4.0)
    assert rig.finish(late).outcomes == (MISS,)
    assert rig.tier.stats().counters["expired"] == 2
    ops.gate.set()
    close(rig)


def test_stores_beyond_the_queue_are_dropped_and_loads_never(tmp_path):
    ops = GatedOps()
    rig = open_rig(tmp_path, ops=ops, queue_jobs_max=2)
    for number in range(5):
        rig.submit(JobKind.STORE, [(key(number), page_aligned(payload(number, 5000)))])
        rig.submit(JobKind.LOAD, [(key(50), page_aligned(bytes(5000)))])
    rig.collect()
    assert [result.outcomes for result in rig._results.values()] == [(MISS,)] * 3
    stats = rig.tier.stats()
    assert stats.counters["store_dropped"] == 3
    assert (stats.counters["stores_waiting"], stats.counters["loads_waiting"]) == (2, 5)
    ops.gate.set()
    rig.settle()
    close(rig)


CHILD = """
import sys, threading
from kvfabric.fabric.config import FileTierConfig
from kvfabric.tiers.fs import FileOps, FileTier
from kvfabric.tiers.base import JobKind
from kvfabric.tiers.testing import ManualClock, Rig, key, page_aligned, payload

class Stuck(FileOps):
    def rename(self, source, target):
        print("here", flush=True)
        threading.Event().wait()

clock = ManualClock()
tier = FileTier(FileTierConfig(root_dir=sys.argv[1], quota_bytes=1 << 20), clock, ops=Stuck())
Rig(tier, clock).submit(JobKind.STORE, [(key(1), page_aligned(payload(1, 5000)))])
threading.Event().wait()
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_swept_and_the_living_are_spared(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        while_alive = make_rig(tmp_path)
        assert len(list(tmp_path.rglob("*.tmp"))) == 1
        assert while_alive.tier.stats().counters["swept"] == 0
        close(while_alive)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    rig = make_rig(tmp_path)
    assert rig.tier.stats().counters["swept"] == 1
    assert not list(tmp_path.rglob("*.tmp"))
    assert rig.tier.stats().used_bytes == 0
    close(rig)
    assert not list(tmp_path.rglob(".owner-*"))


def test_two_instances_serve_each_other(tmp_path):
    one, two = make_rig(tmp_path, chunks=2), make_rig(tmp_path, chunks=2)
    one.store(1, 2)
    assert two.lookup(1, 2) == [MISS, MISS]
    assert two.load(1).outcomes == (HIT,)
    assert two.lookup(1, 2) == [HIT, MISS]
    stored = two.store(2)
    assert (stored.outcomes, stored.bytes_moved) == ((HIT,), 0)
    assert two.tier.stats().counters["adopted"] == 2
    one.store(3)
    assert two.lookup(1) == [HIT]
    assert two.load(1, 2).outcomes == (MISS, HIT)
    assert two.lookup(1) == [MISS]
    assert two.tier.stats().used_bytes == RECORD
    close(one)
    close(two)


def test_a_neighbours_chunk_is_served_without_room_to_adopt_it(tmp_path):
    one, two = make_rig(tmp_path), make_rig(tmp_path, chunks=1)
    two.store(1)
    one.store(2)
    assert two.load(2).outcomes == (HIT,)
    assert two.lookup(1, 2) == [HIT, MISS]
    close(one)
    close(two)


@pytest.mark.parametrize("seed", range(3))
def test_two_busy_instances_do_not_harm_each_other(tmp_path, seed):
    rigs = [
        make_rig(tmp_path, chunks=4, writers=2),
        make_rig(tmp_path, chunks=5, readers=1, writers=2),
    ]
    chance = random.Random(seed)
    loads: list[tuple[Rig, int, int, memoryview]] = []
    for _ in range(120):
        rig, number = chance.choice(rigs), chance.randrange(10)
        if chance.random() < 0.5:
            rig.submit(JobKind.STORE, [(key(number), page_aligned(payload(number, 5000)))])
        else:
            view = page_aligned(bytes(5000))
            job = rig.submit(JobKind.LOAD, [(key(number), view)])
            loads.append((rig, job, number, view))
    for rig, job, number, view in loads:
        if rig.finish(job).outcomes == (HIT,):
            assert view == payload(number, 5000)
    for rig in rigs:
        assert rig.tier.stats().counters["corrupt"] == 0
        close(rig)
    assert not list(tmp_path.rglob("*.tmp"))
    last = make_rig(tmp_path, chunks=20)
    assert last.load(*range(10)).outcomes.count(HIT) == last.tier.stats().chunks
    close(last)


class NoDirectOps(FileOps):
    """A file system without O_DIRECT."""

    def open_new(self, path: str, *, direct: bool):
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open_new(path, direct=False)


def test_the_probe_decides_how_files_are_opened(tmp_path):
    rig = open_rig(tmp_path, ops=NoDirectOps())
    rig.settle()
    assert rig.tier.stats().counters["direct_io"] == 0
    assert rig.tier.stats().counters["disk_full"] == 0
    rig.store(1)
    assert rig.load(1).outcomes == (HIT,)
    close(rig)
    config = FileTierConfig(root_dir=str(tmp_path), quota_bytes=RECORD)
    tier = FileTier(config, ManualClock(), mode=IoMode.DIRECT)
    Rig(tier, ManualClock()).settle()
    assert tier.stats().counters["direct_io"] == 1
    tier.close()


def test_the_factory_makes_what_is_configured(tmp_path):
    clock = ManualClock()
    tier = make_tier(FileTierConfig(root_dir=str(tmp_path), quota_bytes=1 << 20), clock)
    assert isinstance(tier, FileTier)
    tier.close()
    tier = make_tier(MemoryTierConfig(quota_bytes=77), clock)
    assert isinstance(tier, MemoryTier)
    assert tier.stats().quota_bytes == 77
