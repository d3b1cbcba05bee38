"""The file tier when the disk fails, call by call, and when files are not what they were."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from kvfabric.fabric.config import FileTierConfig
from kvfabric.fabric.errors import ConfigError
from kvfabric.fabric.file_record import record_bytes
from kvfabric.tiers.fs import FileOps, FileTier, IoMode
from kvfabric.tiers.testing import HIT, MISS, NAMESPACE, ManualClock, Rig, key

OPERATIONS = [name for name in vars(FileOps) if not name.startswith("_")]
RECORD = record_bytes(5000)


class FailingOps(FileOps):
    """Fails the calls whose numbers (from 1) are in `failing`, with `error`."""

    def __init__(self, failing: range = range(0), error: int = errno.EIO):
        self.failing, self.error, self.calls = failing, error, 0
        self.failed: list[str] = []


def _counted(name: str):
    real = getattr(FileOps, name)

    def call(self: FailingOps, *args: object, **kwargs: object):
        self.calls += 1
        if self.calls in self.failing:
            self.failed.append(name)
            if name == "close":
                real(self, *args, **kwargs)
            raise OSError(self.error, os.strerror(self.error))
        return real(self, *args, **kwargs)

    return call


for _name in OPERATIONS:
    setattr(FailingOps, _name, _counted(_name))


class NamedOps(FileOps):
    """Fails the operations of the given names while they are in `failing`."""

    def __init__(self):
        self.failing: dict[str, int] = {}
        self.calls: list[str] = []

    def _enter(self, name: str):
        self.calls.append(name)
        if name in self.failing:
            raise OSError(self.failing[name], os.strerror(self.failing[name]))


for _name in OPERATIONS:

    def _named(name: str):
        real = getattr(FileOps, name)

        def call(self: NamedOps, *args: object, **kwargs: object):
            self._enter(name)
            return real(self, *args, **kwargs)

        return call

    setattr(NamedOps, _name, _named(_name))


def make_rig(root: Path, ops: FileOps | None = None, chunks: int = 4, mode=IoMode.PROBE) -> Rig:
    clock = ManualClock()
    config = FileTierConfig(root_dir=str(root), quota_bytes=chunks * RECORD, readers=1, writers=1)
    rig = Rig(FileTier(config, clock, ops=ops, mode=mode), clock)
    rig.settle()
    return rig


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def close(rig: Rig) -> None:
    rig.assert_all_surfaced()
    rig.tier.check()
    assert rig.tier.stats().counters["internal_errors"] == 0
    rig.tier.close()


def scenario(root: Path, ops: FileOps) -> None:
    rig = make_rig(root, ops, chunks=3)
    rig.store(1, 2)
    rig.load(1, 2)
    rig.store(3, 4, 1)
    rig.load(4, 3, 2, 1)
    rig.store(5)
    rig.tier.check()
    assert rig.tier.stats().used_bytes <= 3 * RECORD
    close(rig)


@pytest.mark.slow
@pytest.mark.parametrize(("warm", "error"), [(False, errno.EIO), (True, errno.ENOSPC)])
def test_any_one_call_may_fail(tmp_path, warm, error):
    for nth in range(1, 500):
        root = tmp_path / str(nth)
        if warm:
            first = make_rig(root)
            first.store(2, 8, 9)
            close(first)
        ops = FailingOps(range(nth, nth + 1), error)
        try:
            scenario(root, ops)
        except ConfigError:
            assert ops.failed == ["make_root"]
            continue
        assert not list(root.rglob("*.tmp")), (nth, ops.failed)
        again = make_rig(root)
        assert again.tier.stats().used_bytes == sum(p.stat().st_size for p in root.rglob("*.kv"))
        loaded = again.load(*range(10))
        assert loaded.outcomes.count(HIT) == again.tier.stats().chunks
        close(again)
        shutil.rmtree(root)
        if not ops.failed:
            assert nth > 40
            return
    raise AssertionError("never clean")


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_every_call_from_the_nth_on_may_fail(tmp_path, error):
    for nth in range(2, 90, 5):
        root = tmp_path / str(nth)
        scenario(root, FailingOps(range(nth, 10**9), error))
        close(make_rig(root))
        assert not list(root.rglob("*.tmp"))


def test_a_disk_that_is_full_is_left_alone_for_a_while(tmp_path):
    ops = NamedOps()
    rig = make_rig(tmp_path, ops)
    rig.store(1)
    ops.failing["write"] = errno.ENOSPC
    assert rig.store(2).outcomes == (MISS,)
    ops.failing.clear()
    ops.calls.clear()
    rig.clock.sleep_s(4.9)
    assert rig.store(3, 1).outcomes == (MISS, HIT)
    assert ops.calls == []
    assert rig.load(1).outcomes == (HIT,)
    rig.clock.sleep_s(0.2)
    assert rig.store(3).outcomes == (HIT,)
    counters = rig.tier.stats().counters
    assert (counters["disk_full"], counters["store_paused"]) == (1, 1)
    close(rig)


def test_a_read_only_disk_still_serves(tmp_path):
    first = make_rig(tmp_path)
    first.store(1, 2)
    close(first)
    ops = NamedOps()
    for name in ("open_new", "unlink", "rename", "touch", "make_directory", "write"):
        ops.failing[name] = errno.EROFS
    rig = make_rig(tmp_path, ops, chunks=2)
    assert rig.load(1, 2).outcomes == (HIT, HIT)
    assert rig.store(3).outcomes == (MISS,)
    assert rig.lookup(1, 2) == [HIT, HIT]
    assert rig.tier.stats().counters["direct_io"] == 0
    close(rig)


def test_a_read_that_fails_once_is_forgiven(tmp_path):
    ops = NamedOps()
    rig = make_rig(tmp_path, ops)
    rig.store(1)
    ops.failing["read"] = errno.EIO
    assert rig.load(1).outcomes == (MISS,)
    assert rig.lookup(1) == [HIT]
    del ops.failing["read"]
    assert rig.load(1).outcomes == (HIT,)
    ops.failing["read"] = errno.EIO
    assert rig.load(1).outcomes == (MISS,)
    assert rig.lookup(1) == [HIT]
    assert rig.load(1).outcomes == (MISS,)
    assert rig.lookup(1) == [MISS]
    assert rig.tier.stats().used_bytes == 0
    assert not list(tmp_path.rglob("*.kv"))
    close(rig)


def test_a_corrupt_file_that_cannot_be_removed_is_hidden_and_counted(tmp_path):
    ops = NamedOps()
    rig = make_rig(tmp_path, ops)
    rig.store(1, 2)
    damage(tmp_path, 1, 5000)
    ops.failing["unlink"] = errno.EIO
    assert rig.load(1).outcomes == (MISS,)
    assert rig.lookup(1, 2) == [MISS, HIT]
    assert rig.tier.stats().used_bytes == 2 * RECORD
    assert rig.store(1).outcomes == (MISS,)
    ops.failing.clear()
    rig.store(3)
    assert rig.tier.stats().used_bytes == 2 * RECORD == on_disk(tmp_path)
    assert rig.store(1).outcomes == (HIT,)
    close(rig)


def test_a_temporary_file_that_cannot_be_removed_is_counted_until_it_can(tmp_path):
    ops = NamedOps()
    rig = make_rig(tmp_path, ops)
    ops.failing.update(rename=errno.EIO, unlink=errno.EIO)
    assert rig.store(1).outcomes == (MISS,)
    assert rig.tier.stats().used_bytes == RECORD == on_disk(tmp_path)
    rig.tier.check()
    ops.failing.clear()
    assert rig.store(2).outcomes == (HIT,)
    assert rig.tier.stats().used_bytes == RECORD == on_disk(tmp_path)
    close(rig)


def test_closing_tries_once_more_to_remove_what_is_left(tmp_path):
    ops = NamedOps()
    rig = make_rig(tmp_path, ops)
    ops.failing.update(rename=errno.EIO, unlink=errno.EIO)
    assert rig.store(1).outcomes == (MISS,)
    ops.failing.clear()
    close(rig)
    assert on_disk(tmp_path) == 0
    assert not list(tmp_path.rglob("*.tmp"))


def file_of(root: Path, number: int) -> Path:
    name = key(number).hex()
    return root / NAMESPACE.hex() / name[:2] / f"{name}.kv"


def damage(root: Path, number: int, place: int, bit: int = 0) -> None:
    path = file_of(root, number)
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("mode", [IoMode.PROBE, IoMode.BUFFERED])
def test_any_flipped_bit_is_a_miss(tmp_path, mode):
    rig = make_rig(tmp_path, mode=mode)
    places = [*range(88), 88, 2000, *range(4087, 4098), 6000, 9095, 9096, RECORD - 1]
    for number, place in enumerate(places):
        rig.store(1)
        damage(tmp_path, 1, place, number % 8)
        assert rig.load(1).outcomes == (MISS,), place
        assert not file_of(tmp_path, 1).exists()
        assert rig.tier.stats().used_bytes == 0
    assert rig.tier.stats().counters["corrupt"] == len(places)
    close(rig)


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 8192, RECORD - 1, RECORD + 1, 2 * RECORD])
def test_any_other_length_is_a_miss(tmp_path, length):
    rig = make_rig(tmp_path)
    rig.store(1)
    os.truncate(file_of(tmp_path, 1), length)
    assert rig.load(1).outcomes == (MISS,)
    assert rig.lookup(1) == [MISS]
    assert not file_of(tmp_path, 1).exists()
    close(rig)


def test_a_good_record_under_a_wrong_name_is_a_miss(tmp_path):
    rig = make_rig(tmp_path)
    rig.store(1, 2)
    shutil.copy(file_of(tmp_path, 2), file_of(tmp_path, 1))
    assert rig.load(1, 2).outcomes == (MISS, HIT)
    close(rig)


def test_a_file_of_zeros_is_a_miss(tmp_path):
    rig = make_rig(tmp_path)
    rig.store(1)
    file_of(tmp_path, 1).write_bytes(bytes(RECORD))
    assert rig.load(1).outcomes == (MISS,)
    close(rig)


def test_vanished_files_and_directories(tmp_path):
    rig = make_rig(tmp_path / "root")
    rig.store(1, 2, 3)
    rig.follow_events()
    file_of(tmp_path / "root", 1).unlink()
    assert rig.load(1, 2).outcomes == (MISS, HIT)
    assert rig.follow_events() == [(key(1), True)]
    shutil.rmtree(tmp_path / "root" / NAMESPACE.hex())
    assert rig.load(2, 3).outcomes == (MISS, MISS)
    assert rig.tier.stats().used_bytes == 0
    assert rig.tier.stats().counters["vanished"] == 3
    assert rig.store(1).outcomes == (HIT,)
    shutil.rmtree(tmp_path / "root")
    assert rig.store(2).outcomes == (MISS,)
    assert rig.load(1).outcomes == (MISS,)
    assert not (tmp_path / "root").exists()
    close(rig)


def test_a_root_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="root_dir"):
        make_rig(tmp_path / "file" / "root")


@pytest.mark.parametrize("call", ["open_read", "size_bytes", "read"])
def test_a_look_that_fails_in_passing_costs_no_file(tmp_path, call):
    """After a restart a store looks into the file that has its name: out of descriptors, say."""
    rig = make_rig(tmp_path)
    rig.store(1)
    close(rig)
    ops = NamedOps()
    rig = make_rig(tmp_path, ops)
    ops.failing = {call: errno.EMFILE, "open_new": errno.EMFILE}
    rig.store(1)
    ops.failing = {}
    assert rig.tier.stats().used_bytes == on_disk(tmp_path)
    assert rig.lookup(1) == [HIT]
    assert rig.load(1).outcomes == (HIT,)
    close(rig)
