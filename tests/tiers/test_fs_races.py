"""What another thread or process does between two calls of the file system, made to happen."""

import threading
from collections.abc import Callable
from pathlib import Path

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.file_record import record_bytes
from kvfabric.fabric.types import Chunk, Lookup, SlotRef
from kvfabric.tiers.fs import FileOps
from kvfabric.tiers.fs.index import FileIndex
from kvfabric.tiers.fs.jobs import Done
from kvfabric.tiers.fs.records import RecordFiles, Scratch
from kvfabric.tiers.fs.transfers import Transfers
from kvfabric.tiers.testing import NAMESPACE, ManualClock, key, page_aligned, payload
from kvfabric.tiers.tier_events import RecordId

RECORD = record_bytes(5000)


class InterruptedOps(FileOps):
    """Runs `between` once, in the middle of the named operation."""

    def __init__(self):
        self.operation = ""
        self.between: Callable[[], object] = lambda: None

    def interrupt(self, operation: str, between: Callable[[], object]) -> None:
        self.operation, self.between = operation, between

    def _strike(self, operation: str) -> None:
        if operation == self.operation:
            self.operation = ""
            self.between()

    def open_read(self, path: str, *, direct: bool):
        try:
            return super().open_read(path, direct=direct)
        finally:
            self._strike("open_read")

    def read(self, descriptor: int, buffers):
        count = super().read(descriptor, buffers)
        self._strike("read")
        return count

    def rename(self, source: str, target: str):
        self._strike("rename")
        super().rename(source, target)

    def unlink(self, path: str):
        self._strike("unlink")
        super().unlink(path)


class Bench:
    """Transfers without threads: everything happens in the test's order."""

    def __init__(self, root: Path, chunks: int):
        self.root, self.ops = root, InterruptedOps()
        self.index = FileIndex(chunks * RECORD)
        files = RecordFiles(str(root), "bench", self.ops)
        self.transfers = Transfers(self.index, files, ManualClock(), threading.RLock())
        self.files = files

    def store(self, number: int) -> list[Done]:
        view = page_aligned(payload(number, 5000))
        chunk = Chunk(key(number), SlotRef(0, 1), 5000, checksum(view))
        told: list[Done] = []
        record = RecordId(NAMESPACE, key(number))
        self.transfers.store(record, chunk, view, Scratch(), told.append)
        return told

    def load(self, number: int) -> Lookup:
        view = page_aligned(bytes(5000))
        done = self.transfers.load(RecordId(NAMESPACE, key(number)), view, Scratch())
        if done.outcome is Lookup.HIT:
            assert view == payload(number, 5000)
        return done.outcome

    def check(self) -> None:
        self.index.check()
        held = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        assert self.index.used_bytes == held
        assert all(self.load(int.from_bytes(r.key[:32], "little")) for r in [*self.index.present])


def test_evicted_and_stored_again_while_a_load_finds_nothing(tmp_path):
    bench = Bench(tmp_path, chunks=1)
    bench.store(1)
    bench.files.remove(RecordId(NAMESPACE, key(1)))
    bench.ops.interrupt("open_read", lambda: (bench.store(2), bench.store(1)))
    assert bench.load(1) is Lookup.MISS
    assert list(bench.index.present) == [RecordId(NAMESPACE, key(1))]
    bench.check()


def test_stored_while_a_load_finds_a_strangers_corrupt_file(tmp_path):
    bench = Bench(tmp_path, chunks=2)
    bench.store(2)
    path = Path(bench.files.path(RecordId(NAMESPACE, key(1))))
    path.parent.mkdir()
    path.write_bytes(bytes(RECORD))
    bench.ops.interrupt("read", lambda: bench.store(1))
    assert bench.load(1) is Lookup.MISS
    assert bench.load(1) is Lookup.HIT
    bench.check()


def test_a_strangers_corrupt_file_is_removed(tmp_path):
    bench = Bench(tmp_path, chunks=2)
    bench.store(1)
    path = Path(bench.files.path(RecordId(NAMESPACE, key(1))))
    path.write_bytes(bytes(RECORD))
    stranger = Bench(tmp_path, chunks=2)
    assert stranger.load(1) is Lookup.MISS
    assert not path.exists()
    stranger.check()


def test_a_second_store_waits_for_the_first(tmp_path):
    bench = Bench(tmp_path, chunks=2)
    waiting: list[list[Done]] = []
    bench.ops.interrupt("rename", lambda: waiting.append(bench.store(1)))
    first = bench.store(1)
    assert [done.outcome for done in first + waiting[0]] == [Lookup.HIT, Lookup.HIT]
    assert [done.moved_bytes for done in first + waiting[0]] == [5000, 0]
    bench.check()


def test_a_second_store_is_told_when_the_first_fails(tmp_path):
    bench = Bench(tmp_path, chunks=2)
    waiting: list[list[Done]] = []

    def fail():
        waiting.append(bench.store(1))
        raise OSError(5, "input/output error")

    bench.ops.interrupt("rename", fail)
    first = bench.store(1)
    assert [done.outcome for done in first + waiting[0]] == [Lookup.MISS, Lookup.MISS]
    bench.check()


def test_the_victims_room_is_not_given_away_twice(tmp_path):
    bench = Bench(tmp_path, chunks=1)
    bench.store(1)
    told: list[list[Done]] = []
    bench.ops.interrupt("unlink", lambda: told.append(bench.store(3)))
    assert [done.outcome for done in bench.store(2)] == [Lookup.HIT]
    assert [done.outcome for done in told[0]] == [Lookup.MISS]
    bench.check()


def test_what_is_leaving_is_not_stored_until_it_is_gone(tmp_path):
    bench = Bench(tmp_path, chunks=1)
    bench.store(1)
    told: list[list[Done]] = []
    bench.ops.interrupt("unlink", lambda: told.append(bench.store(1)))
    bench.store(2)
    assert [done.outcome for done in told[0]] == [Lookup.MISS]
    assert [done.outcome for done in bench.store(1)] == [Lookup.HIT]
    bench.check()


def test_evicted_while_it_is_loaded(tmp_path):
    bench = Bench(tmp_path, chunks=1)
    bench.store(1)
    bench.ops.interrupt("open_read", lambda: bench.store(2))
    assert bench.load(1) is Lookup.HIT
    assert list(bench.index.present) == [RecordId(NAMESPACE, key(2))]
    bench.check()
