"""A pool and its readers in different processes, over files in shared memory."""

import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.config import HostConfig
from kvfabric.fabric.types import Committed, Lookup, NamespaceId, Reserved, make_key
from kvfabric.tiers.pool.directory import Directory
from kvfabric.tiers.pool.reader import TableReader
from kvfabric.tiers.pool.region import Region, RegionView
from kvfabric.tiers.pool.sweep import sweep
from kvfabric.tiers.pool.table import SlotTable

SHM = "/dev/shm"
NS = NamespaceId(b"n" * 16)
SLOTS = 32
HOST = HostConfig(slot_bytes=4096, region_bytes=SLOTS * 4096)
KEYS = [make_key(hashlib.sha256(b"%d" % n).digest(), 0) for n in range(100)]
NUMBER = {key: number for number, key in enumerate(KEYS)}

pytestmark = pytest.mark.skipif(not os.path.isdir(SHM), reason="needs /dev/shm")


@pytest.fixture
def run() -> Iterator[str]:
    """A run of its own; whatever the test leaves is an error and is removed."""
    name = f"test{os.getpid()}"
    yield name
    assert sweep(SHM, name) == []


def in_child(body: Callable[[int], None]) -> tuple[int, int]:
    """Run `body(pipe)` in a fork. Returns its pid and the pipe's reading end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            body(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return pid, reading


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def payload(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


def store(region: Region, directory: Directory, numbers: list[int], now_s: float = 0.0) -> None:
    lengths = [64 + number for number in numbers]
    granted = directory.reserve(
        "w", NS, [KEYS[n] for n in numbers], range(len(numbers)), lengths, now_s
    )
    refs = []
    sums = []
    for number, answer, length in zip(numbers, granted, lengths, strict=True):
        if answer.status is Reserved.GRANTED:
            view = region.view(answer.slot.slot, length)
            view[:] = payload(number, length)
            refs.append(answer.slot)
            sums.append(checksum(view))
    assert set(directory.commit("w", refs, sums, now_s)) <= {Committed.READY}


def pool(run: str) -> tuple[Region, Directory]:
    region = Region.open(SHM, run, "node", HOST)
    directory = Directory(SlotTable(region.control), quarantine_slots_max=SLOTS)
    directory.adopt(lambda _pid, _started: False)
    directory.open_owner("w", 1e9, os.getpid(), 1, 0.0)
    return region, directory


def verified_hits(reader: TableReader, view: RegionView) -> set[int]:
    """Look everything up, and check the bytes of every hit against key and checksum."""
    answer = reader.lookup(NS, KEYS)
    hits = np.flatnonzero(answer.states == Lookup.HIT).tolist()
    for number in hits:
        piece = view.view(int(answer.slots[number]), int(answer.lengths[number]))
        assert bytes(piece) == payload(number, 64 + number)
        assert checksum(piece) == answer.checksums[number]
    return set(hits)


def test_a_forked_reader_sees_what_the_parent_commits(run: str):
    region, directory = pool(run)
    ask, answer = os.pipe()

    def child(pipe: int) -> None:
        view = RegionView.attach(region.control_path, region.segment_paths)
        reader = TableReader(view.control)
        os.write(pipe, bytes([len(verified_hits(reader, view))]))
        while os.read(ask, 1) == b"?":
            os.write(pipe, bytes([len(verified_hits(reader, view))]))

    pid, reading = in_child(child)
    try:
        seen = [os.read(reading, 1)[0]]
        for start in (0, 10, 20):
            store(region, directory, list(range(start, start + 10)))
            os.write(answer, b"?")
            seen.append(os.read(reading, 1)[0])
        os.write(answer, b".")
        assert exit_code(pid) == 0
        assert seen == [0, 10, 20, 30]
    finally:
        for fd in (reading, ask, answer):
            os.close(fd)
        region.close(unlink=True)


def test_a_reader_in_another_process_never_hits_a_wrong_record(run: str):
    """The parent recycles 32 slots among 100 keys as fast as it can while the child looks up."""
    region, directory = pool(run)

    def child(pipe: int) -> None:
        view = RegionView.attach(region.control_path, region.segment_paths)
        reader = TableReader(view.control)
        hits = 0
        while hits < 3000:
            answer = reader.lookup(NS, KEYS)
            ready = np.flatnonzero(answer.states == Lookup.HIT)
            hits += len(ready)
            assert (answer.lengths[ready] == 64 + ready).all()
            assert (answer.checksums[ready] == 7 + ready).all()
        os.write(pipe, b"k")

    pid, reading = in_child(child)
    try:
        os.set_blocking(reading, False)
        rng = random.Random(5)
        said = b""
        for _ in range(20_000):
            numbers = rng.sample(range(100), 8)
            lengths = [64 + n for n in numbers]
            granted = directory.reserve("w", NS, [KEYS[n] for n in numbers], range(8), lengths, 0.0)
            fresh = [(n, r.slot) for n, r in zip(numbers, granted, strict=True) if r.status == 0]
            directory.commit("w", [slot for _, slot in fresh], [7 + n for n, _ in fresh], 0.0)
            directory.take_changes()
            try:
                said = os.read(reading, 1)
                break
            except BlockingIOError:
                continue
        directory.check()
        assert said == b"k"
        assert exit_code(pid) == 0
    finally:
        os.close(reading)
        region.close(unlink=True)


@pytest.mark.parametrize("kills", [1, 40, 200])
def test_a_killed_pool_is_adopted_with_all_its_ready_chunks(run: str, kills: int):
    """SIGKILL in the middle of reserving, committing and evicting, after some progress."""

    def child(pipe: int) -> None:
        region, directory = pool(run)
        rng = random.Random(kills)
        store(region, directory, list(range(SLOTS)))
        os.write(pipe, b".")
        while True:
            store(region, directory, rng.sample(range(100), 4))
            directory.take_changes()
            os.write(pipe, b".")

    pid, reading = in_child(child)
    for _ in range(kills):
        assert os.read(reading, 1) == b"."
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    os.close(reading)

    region = Region.open(SHM, run, "node", HOST)
    try:
        assert region.adopted
        view = RegionView.attach(region.control_path, region.segment_paths)
        reader = TableReader(view.control)
        before = verified_hits(reader, view)
        directory = Directory(SlotTable(region.control), quarantine_slots_max=SLOTS)
        adopted = directory.adopt(lambda _pid, _started: False)
        directory.check()
        after = verified_hits(reader, view)
        assert before <= after
        assert {NUMBER[chunk.key] for _, chunk in directory.ready_chunks()} == after
        assert adopted.ready == len(after) >= SLOTS - 4
        assert adopted.dropped <= 1
        assert directory.stats().free == SLOTS - adopted.ready
        del reader
        view.close()
    finally:
        region.close(unlink=True)


def test_a_reader_goes_on_through_the_death_and_return_of_the_pool(run: str):
    def child(pipe: int) -> None:
        region, directory = pool(run)
        store(region, directory, list(range(20)))
        os.write(pipe, region.control_path.encode())
        os.read(os.pipe()[0], 1)

    pid, reading = in_child(child)
    path = os.read(reading, 1000).decode()
    view = RegionView.attach(path, [path.replace(".control", ".seg0")])
    reader = TableReader(view.control)
    assert verified_hits(reader, view) == set(range(20))
    os.kill(pid, signal.SIGKILL)
    exit_code(pid)
    os.close(reading)
    assert verified_hits(reader, view) == set(range(20))
    region, directory = pool(run)
    assert verified_hits(reader, view) == set(range(20))
    store(region, directory, list(range(20, 60)))
    assert verified_hits(reader, view) == {NUMBER[c.key] for _, c in directory.ready_chunks()}
    del reader
    view.close()
    region.close(unlink=True)
